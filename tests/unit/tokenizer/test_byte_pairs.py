"""byte_pairs.bin: the ids of the library, whatever the text; and what no such file can hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from trivet.backends.contract.byte_pairs import BYTE_PAIRS_NAME, BytePairsHeader
from trivet.exporters.checkpoint import open_checkpoint
from trivet.exporters.tokenizer import BuiltTokenizer, build_tokenizer
from trivet.exporters.tokenizer.byte_pairs import write_byte_pairs
from trivet.runtime.tokenizer import Tokenizer, TokenizerLoadError
from trivet.runtime.tokenizer.byte_pairs import BytePairs

TEXTS = [
    "",
    " ",
    "a" * 12000,
    "the the  the\n\n\tfox",
    "naïve 🙂 日本語 \u0301 \U0001f3f4\u200d",
    "x" * 7 + "\0" + "y",
]


def opened(backend: Backend, folder: Path) -> BytePairs:
    assert write_byte_pairs(backend.to_str(), folder)
    pairs = BytePairs.of_package(folder)
    assert pairs is not None
    return pairs


def assert_same(pairs: BytePairs, backend: Backend, texts: list[str]) -> None:
    for text in texts:
        for special in (True, False):
            ours = pairs.encode(text, add_special_tokens=special).ids
            assert ours == backend.encode(text, add_special_tokens=special).ids, (text, special)


@pytest.fixture(scope="module")
def tiny(tokenizer_source: Any, bpe: Any) -> BuiltTokenizer:
    return build_tokenizer(tokenizer_source(metadata=bpe(add_bos_token=True)))


@pytest.fixture(scope="module")
def tiny_pairs(tiny: BuiltTokenizer, tmp_path_factory: pytest.TempPathFactory) -> BytePairs:
    return opened(tiny.tokenizer, tmp_path_factory.mktemp("tiny"))


_WORDS = st.sampled_from(["<|im_start|>", "<|endoftext|>", "the", " fox", "\n", "12", "ing", "é", "🙂", "'s", "\u3000"])


@given(st.one_of(st.text(), st.lists(_WORDS).map("".join)))
@settings(deadline=None, max_examples=300)
def test_any_text(tiny: BuiltTokenizer, tiny_pairs: BytePairs, text: str) -> None:
    assert_same(tiny_pairs, tiny.tokenizer, [text])


def test_the_vocabulary_is_the_same(tiny: BuiltTokenizer, tiny_pairs: BytePairs) -> None:
    size = tiny.tokenizer.get_vocab_size()
    assert tiny_pairs.get_vocab_size() == size
    for i in range(-1, size + 1):
        token = tiny.tokenizer.id_to_token(i) if i >= 0 else None
        assert tiny_pairs.id_to_token(i) == token
        assert token is None or tiny_pairs.token_to_id(token) == i
    assert tiny_pairs.token_to_id("no such token") is None


def test_smollm2(smollm2: Tokenizer, probes: dict[str, Any], tmp_path: Path) -> None:
    backend = smollm2._backend
    assert isinstance(backend, Backend)
    assert_same(opened(backend, tmp_path), backend, TEXTS + probes["probes"] + probes["special_probes"]["smollm2"])


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "deepseek-v3", "gpt-oss", "gemma3", "llama2"])
def test_published_tokenizers(
    name: str, real_model: Callable[[str], Path], probes: dict[str, Any], tmp_path: Path
) -> None:
    backend = Backend.from_file(str(real_model(f"tok-{name}") / "tokenizer.json"))
    special = [text for texts in probes["special_probes"].values() for text in texts]
    assert_same(opened(backend, tmp_path), backend, TEXTS + probes["probes"] + special)


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "gemma-3-270m"])
def test_published_gguf_files(name: str, real_model: Callable[[str], Path], probes: dict[str, Any],
                              tokenizer_source: Any, tmp_path: Path) -> None:  # fmt: skip
    metadata = dict(open_checkpoint(real_model(name)).metadata)
    backend = build_tokenizer(tokenizer_source(metadata=metadata)).tokenizer
    assert_same(opened(backend, tmp_path), backend, TEXTS + probes["probes"])


def changed(backend: Backend, **model: Any) -> Backend:
    whole = json.loads(backend.to_str())
    whole["model"] |= model
    return Backend.from_str(json.dumps(whole))


def test_whole_words_come_before_merges(tiny: BuiltTokenizer, tmp_path: Path) -> None:
    """A word of the vocabulary that no merge makes."""
    vocab = json.loads(tiny.tokenizer.to_str())["model"]["vocab"]
    longer = changed(tiny.tokenizer, vocab=vocab | {"Ġzqxj": len(vocab)}, ignore_merges=True)
    pairs = opened(longer, tmp_path)
    assert_same(pairs, longer, ["the zqxj", "the zqxjz fox", "zqxj", *TEXTS])
    assert len(vocab) in pairs.encode("the zqxj", add_special_tokens=False).ids


def test_of_a_pair_that_is_there_twice_the_last_rank_counts(tiny: BuiltTokenizer, tmp_path: Path) -> None:
    merges = json.loads(tiny.tokenizer.to_str())["model"]["merges"]
    twice = changed(tiny.tokenizer, merges=merges + merges[:5])
    assert_same(opened(twice, tmp_path), twice, [*TEXTS, "the other then he here in an"])


@pytest.mark.parametrize(
    "model",
    [
        {"dropout": 0.1},
        {"continuing_subword_prefix": "t"},
        {"unk_token": "the", "ignore_merges": True},
        {"byte_fallback": True, "ignore_merges": True},
    ],
)
def test_special_cases_stay_with_the_library(model: dict[str, Any], tiny: BuiltTokenizer, tmp_path: Path) -> None:
    assert not write_byte_pairs(changed(tiny.tokenizer, merges=[], **model).to_str(), tmp_path)
    assert BytePairs.of_package(tmp_path) is None


def test_unigram_stays_with_the_library(tmp_path: Path) -> None:
    assert not write_byte_pairs(Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)).to_str(), tmp_path)


# --- SentencePiece ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["bytes", "no bytes", "unknowns apart"])
def pieces(
    request: pytest.FixtureRequest, from_metadata: Any, spm: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[BytePairs, Backend]:
    """A vocabulary by score; characters that are not in it become bytes, or <unk>, one for several or one each."""
    model = {"bytes": {}, "no bytes": {"byte_fallback": False}}
    backend = from_metadata(spm()).tokenizer
    backend = changed(backend, **model.get(request.param, {"byte_fallback": False, "fuse_unk": False}))
    return opened(backend, tmp_path_factory.mktemp("pieces")), backend


_PIECES = st.sampled_from(["<s>", "</s>", "<unk>", "<0x41>", "hello", " world", "\u2581", "  ", "\n", "é", "🙂", "ll"])


@given(st.one_of(st.text(), st.lists(_PIECES).map("".join)))
@settings(deadline=None, max_examples=300)
def test_any_text_in_pieces(pieces: tuple[BytePairs, Backend], text: str) -> None:
    assert_same(*pieces, [text])


def test_texts_in_pieces(pieces: tuple[BytePairs, Backend], probes: dict[str, Any]) -> None:
    assert_same(*pieces, TEXTS + probes["probes"])


@pytest.mark.parametrize("section", ["first", "right", "product", "text_end", "by_text", "splitter"])
def test_a_damaged_file_is_refused(section: str, tiny: BuiltTokenizer, tmp_path: Path) -> None:
    assert write_byte_pairs(tiny.tokenizer.to_str(), tmp_path)
    path = tmp_path / BYTE_PAIRS_NAME
    data = bytearray(path.read_bytes())
    offset, size = BytePairsHeader.unpack(bytes(data)).sections()[section]
    data[offset + size // 2 // 4 * 4 : offset + size // 2 // 4 * 4 + 4] = b"\xff" * 4
    path.write_bytes(data)
    with pytest.raises(TokenizerLoadError, match=r"byte_pairs.bin: cannot be used \(.+\); export the model again"):
        BytePairs(path)


def test_a_splitter_with_ids_that_the_tables_lack_is_refused(tiny: BuiltTokenizer, tmp_path: Path) -> None:
    """The merging would read far outside of the file."""
    assert write_byte_pairs(tiny.tokenizer.to_str(), tmp_path)
    path = tmp_path / BYTE_PAIRS_NAME
    data = bytearray(path.read_bytes())
    offset, size = BytePairsHeader.unpack(bytes(data)).sections()["splitter"]
    splitter = json.loads(data[offset : offset + size])
    splitter["model"]["vocab"] = {"a": 4_000_000_000}
    changed_splitter = json.dumps(splitter).encode()
    assert len(changed_splitter) <= size
    data[offset : offset + size] = changed_splitter.ljust(size)
    path.write_bytes(data)
    with pytest.raises(TokenizerLoadError, match="its tables contradict each other"):
        BytePairs(path)


@pytest.mark.parametrize("cut", [0, 5, 100, -8])
def test_a_cut_file_is_refused(cut: int, tiny: BuiltTokenizer, tmp_path: Path) -> None:
    assert write_byte_pairs(tiny.tokenizer.to_str(), tmp_path)
    path = tmp_path / BYTE_PAIRS_NAME
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TokenizerLoadError, match=r"byte_pairs.bin: cannot be used"):
        BytePairs(path)
