"""Incremental detokenisation: the deltas join to the full text, and no delta holds half a character."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from trivet.exporters.tokenizer import build_tokenizer
from trivet.runtime.tokenizer import IncrementalDetokenizer, InvalidTokenError, Tokenizer

ALPHABET = (
    "abcdefghij XYZ  \n\t0123456789.,;!?'\"<>|{}_-éüßñøçžłąőאבגدذरक्षไทยあいカ漢字你好世界한국어"
    "🙂🏳️\u200d🌈👩\u200d👩\u200d👧👍🏽🇩🇪\u0301\u0308ɪŋʃθ∑√∞€\u2581\u00a0\u3000"
)
WORDS = [
    "the",
    "naïve",
    "straße",
    "漢字かな",
    "안녕",
    "مرحبا",
    "🏳️\u200d🌈",
    "👩\u200d👩\u200d👧\u200d👦",
    "12345",
    "\n\n",
    "    ",
    "def f():",
    "नमस्ते",
]


def random_text(generator: random.Random) -> str:
    parts = [
        generator.choice(WORDS) if generator.random() < 0.3 else generator.choice(ALPHABET)
        for _ in range(generator.randint(0, 40))
    ]
    return "".join(parts)


def deltas(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), **options: Any) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    texts = []
    for token_id in ids:
        detokenizer.update([token_id], False)
        texts.append(detokenizer.get_next_output_text(finished=False, delta=True))
    texts.append(detokenizer.get_next_output_text(finished=True, delta=True))
    assert detokenizer.get_next_output_text(finished=True, delta=False) == "".join(texts)
    return texts


def check_texts(tokenizer: Tokenizer, count: int, seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(count):
        text = random_text(generator)
        ids = tokenizer.encode(text, add_special_tokens=False)
        got = deltas(tokenizer, ids)
        assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=True)
        assert not any("\ufffd" in delta for delta in got)


def test_deltas_join_to_the_text_smollm2(smollm2: Tokenizer) -> None:
    check_texts(smollm2, 2000, seed=1)


def test_deltas_join_to_the_text_tiny(tiny_bpe: Tokenizer, tiny_spm: Tokenizer) -> None:
    check_texts(tiny_bpe, 1500, seed=2)
    check_texts(tiny_spm, 1500, seed=3)


def test_text_round_trips(tiny_bpe: Tokenizer, smollm2: Tokenizer) -> None:
    generator = random.Random(4)
    for _ in range(300):
        text = random_text(generator)
        assert tiny_bpe.decode(tiny_bpe.encode(text)) == text
        assert smollm2.decode(smollm2.encode(text)) == text


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "llama2", "gemma3", "deepseek-v3", "gpt-oss"])
def test_deltas_join_to_the_text_cached(
    name: str, real_model: Callable[[str], Path], tokenizer_source: Any, load: Any
) -> None:
    tokenizer = load(build_tokenizer(tokenizer_source(kind="safetensors", directory=real_model(f"tok-{name}"))))
    check_texts(tokenizer, 1000, seed=5)
    generator = random.Random(6)
    for _ in range(200):
        ids = tokenizer.encode(random_text(generator), add_special_tokens=False)
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 399), max_size=30), st.lists(st.integers(0, 399), max_size=6), st.booleans())
def test_any_ids_join_to_their_decoding(tiny_bpe: Tokenizer, ids: list[int], prompt: list[int], skip: bool) -> None:
    """Invalid UTF-8 included; with a prompt, what follows it is what the whole adds to it."""
    got = "".join(deltas(tiny_bpe, ids, skip_special_tokens=skip))
    assert got == tiny_bpe.decode(ids, skip_special_tokens=skip)
    assert isinstance(tiny_bpe._backend, Backend)
    assert got == tiny_bpe._backend.decode(ids, skip_special_tokens=skip)
    whole = tiny_bpe.decode([*prompt, *ids], skip_special_tokens=skip)
    assert whole.endswith("".join(deltas(tiny_bpe, ids, prompt, skip_special_tokens=skip)))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 399), max_size=30), st.booleans())
def test_any_scored_ids_join_to_their_decoding(tiny_spm: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(deltas(tiny_spm, ids, skip_special_tokens=skip)) == tiny_spm.decode(ids, skip_special_tokens=skip)


def test_a_character_comes_out_whole(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    assert deltas(smollm2, ids) == [""] * (len(ids) - 1) + ["🙂", ""]


def test_unfinished_character_comes_out_at_the_end(tiny_bpe: Tokenizer, tiny_spm: Tokenizer) -> None:
    ids = tiny_bpe.encode("a🙂", add_special_tokens=False)[:-1]
    assert deltas(tiny_bpe, ids)[-1] == "\ufffd"
    assert tiny_bpe.decode(ids) == "a\ufffd"
    byte = tiny_spm.token_to_id("<0xE4>")
    assert byte is not None
    assert deltas(tiny_spm, [byte, byte + 1]) == ["", "\ufffd", "\ufffd"]


def test_byte_tokens_are_replaced_one_by_one(tiny_spm: Tokenizer) -> None:
    """As sentencepiece: a valid character stays whole beside invalid bytes, and each invalid byte is one U+FFFD."""
    ids = [tiny_spm.token_to_id(f"<0x{b:02X}>") or 0 for b in (0xE4, 0xBD, 0xA0, 0xFF, 0xE4, 0xBD)]
    assert tiny_spm.decode(ids) == "你" + "\ufffd" * 3


def test_prompt_gives_the_context(tiny_spm: Tokenizer, tiny_bpe: Tokenizer) -> None:
    the = tiny_spm.token_to_id("\u2581the")
    assert the is not None
    assert deltas(tiny_spm, [the, the]) == ["the", " the", ""]
    assert deltas(tiny_spm, [the], prompt=[1]) == ["the", ""]  # <s> is skipped: still the start of the text
    assert deltas(tiny_spm, [the], prompt=[1, the]) == [" the", ""]
    face = tiny_bpe.encode("🙂", add_special_tokens=False)
    assert len(face) == 4
    for cut in (1, 2, 3):  # the prompt ends inside a character
        assert "".join(deltas(tiny_bpe, face[cut:], prompt=[*face, *face[:cut]])) == "🙂"


def test_special_tokens_are_skipped_or_shown(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a<|im_end|><|im_start|>b", add_special_tokens=False)
    assert "".join(deltas(smollm2, ids)) == "ab"
    assert "".join(deltas(smollm2, ids, skip_special_tokens=False)) == "a<|im_end|><|im_start|>b"
    shown = deltas(smollm2, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(shown) == "a<|im_end|><|im_start|>b"


def test_spaces_between_special_tokens(tokenizer_source: Any, spm: Any, load: Any) -> None:
    metadata = spm(add_space_prefix=False)
    for i, token in ((300, "\u2581<x>"), (301, "\u2581<y>")):
        metadata["tokenizer.ggml.tokens"][i] = token
        metadata["tokenizer.ggml.token_type"][i] = 4
    tokenizer = load(build_tokenizer(tokenizer_source(metadata=metadata)))
    assert "".join(deltas(tokenizer, [300, 301], skip_special_tokens=False)) == " <x> <y>"
    raw = deltas(tokenizer, [300, 301], skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(raw) == " <x>\u2581<y>"


def run(tokenizer: Tokenizer, text: str, **options: Any) -> tuple[str | None, str, list[str]]:
    """(matched stop, output, deltas) of feeding the tokens of `text` until a stop string matches."""
    detokenizer = IncrementalDetokenizer(tokenizer, [], **options)
    matched, texts = None, []
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        matched = detokenizer.update([token_id], False)
        texts.append(detokenizer.get_next_output_text(finished=matched is not None, delta=True))
        if matched is not None:
            break
    else:
        texts.append(detokenizer.get_next_output_text(finished=True, delta=True))
    assert "".join(texts) == detokenizer.output_text
    return matched, detokenizer.output_text, texts


def test_stop_string_across_tokens(smollm2: Tokenizer) -> None:
    text = "one two three STOP four"
    for stop in ("STOP", "e STOP f", " thr", "ee ST", "o"):
        matched, output, texts = run(smollm2, text, stop=[stop])
        assert matched == stop
        assert output == text[: text.index(stop)]
        assert all(stop[0] not in t or t in text[: text.index(stop)] for t in texts)  # nothing of it got out
        matched, output, _ = run(smollm2, text, stop=[stop], include_stop_str_in_output=True)
        assert output == text[: text.index(stop) + len(stop)]


def test_stop_string_that_never_comes_is_held_back_and_released(smollm2: Tokenizer) -> None:
    matched, output, texts = run(smollm2, "one two three", stop=["threesome"])
    assert matched is None and output == "one two three"
    assert texts[-1] == "wo three"[-8:]  # len("threesome") - 1 characters waited for the end
    detokenizer = IncrementalDetokenizer(smollm2, [], stop=["abcd"])
    detokenizer.update(smollm2.encode("xyzuvw", add_special_tokens=False), False)
    assert detokenizer.get_next_output_text(finished=False, delta=False) == "xyz"
    assert detokenizer.get_next_output_text(finished=False, delta=True) == "xyz"
    assert detokenizer.get_next_output_text(finished=False, delta=True) == ""


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab ", max_size=30),
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_output_never_holds_the_stop_string(tiny_bpe: Tokenizer, text: str, stop: list[str]) -> None:
    matched, output, texts = run(tiny_bpe, text, stop=stop)
    # Of several that end in one token the first in the list counts, as in vLLM, so another can stand before it.
    assert not any(s in output for s in (stop if matched is None else [matched]))
    assert (matched is None) == (not any(s in text for s in stop))
    assert text.startswith("".join(texts))


def test_min_tokens_looks_at_later_text_only(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a b a b a b", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(smollm2, [], stop=[" b"], min_tokens=3)
    matches = [detokenizer.update([i], False) for i in ids]
    assert matches.index(" b") == 3
    assert detokenizer.num_output_tokens == len(ids)
    several = IncrementalDetokenizer(smollm2, [], stop=[" b"], min_tokens=3)
    assert several.update(ids, False) == " b" and several.output_text == "a b a"


def test_stop_token_text_is_left_out(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("ok.", add_special_tokens=False)
    for include, expected in ((False, "ok"), (True, "ok.")):
        detokenizer = IncrementalDetokenizer(smollm2, [], include_stop_str_in_output=include)
        assert detokenizer.update(ids, True) is None
        assert detokenizer.get_next_output_text(finished=True, delta=True) == expected
        assert detokenizer.num_output_tokens == len(ids)


def test_unknown_ids(smollm2: Tokenizer, tokenizer_source: Any, bpe: Any, load: Any) -> None:
    for wrong in (-1, 49152):
        with pytest.raises(InvalidTokenError, match="outside the vocabulary"):
            smollm2.decode([wrong])
    padded = load(build_tokenizer(tokenizer_source(metadata=bpe())), 512)
    assert padded.decode([450]) == "" and deltas(padded, [450]) == ["", ""]  # padding of the model's vocabulary


def test_a_token_costs_the_same_late_as_early(tiny_bpe: Tokenizer) -> None:
    """20,000 continuation bytes that never become a character; quadratic work would take minutes."""
    byte = tiny_bpe.encode("🙂", add_special_tokens=False)[0]
    detokenizer = IncrementalDetokenizer(tiny_bpe, [])
    started = time.process_time()
    for _ in range(20_000):
        detokenizer.update([byte], False)
        detokenizer.get_next_output_text(finished=False, delta=True)
    assert time.process_time() - started < 5
    assert detokenizer.get_next_output_text(finished=True, delta=False) == "\ufffd" * 20_000
