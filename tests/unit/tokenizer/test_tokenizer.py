"""The runtime's Tokenizer: packages, bos, the length guard, ids out of range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trivet.backends.contract.manifest import (
    SCHEMA_VERSION,
    Architecture,
    GenerationDefaults,
    Manifest,
    Verification,
)
from trivet.exporters.tokenizer import BuiltTokenizer, build_tokenizer
from trivet.runtime.errors import InvalidRequestError, ModelLoadError
from trivet.runtime.tokenizer import InvalidTokenError, PromptTooLongError, Tokenizer, TokenizerLoadError


def manifest(built: BuiltTokenizer, vocab_size: int) -> Manifest:
    architecture = Architecture(
        family="llama",
        name="tiny",
        vocab_size=vocab_size,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
        weight_formats={},
        dtype="float32",
        num_parameters=1,
    )
    return Manifest(
        schema_version=SCHEMA_VERSION,
        trivet_version="0",
        source_dir="/",
        sources=[],
        architecture=architecture,
        kv_cache=[],
        tokenizer=built.spec,
        generation=GenerationDefaults(),
        verification=Verification(performed=False),
    )


@pytest.fixture
def built(tokenizer_source: Any, bpe: Any) -> BuiltTokenizer:
    return build_tokenizer(
        tokenizer_source(metadata={**bpe(add_bos_token=True), "tokenizer.chat_template": "{{ bos_token }}T\n"})
    )


def test_a_package_gives_the_same_tokenizer(built: BuiltTokenizer, tmp_path: Path, load: Any) -> None:
    built.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(built.chat_template or "")
    tokenizer = Tokenizer.from_package(tmp_path, manifest(built, 400))
    text = "<|im_start|>the 12 naïve 🙂  fox\n"
    assert tokenizer.encode(text) == load(built).encode(text)
    assert tokenizer.apply_chat_template([]) == "<|bos|>T"  # jinja drops a template's last newline
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (395, 396, 400)
    assert tokenizer.id_to_token(395) == "<|bos|>" and tokenizer.id_to_token(4000) is None


def test_a_broken_package_is_reported(built: BuiltTokenizer, tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_package(tmp_path, manifest(built, 400))
    (tmp_path / "tokenizer.json").write_text('{"version": "9.9"}')
    with pytest.raises(ModelLoadError, match="export the model again"):
        Tokenizer.from_package(tmp_path, manifest(built, 400))


def test_bos_and_eos_are_never_doubled(tokenizer_source: Any, bpe: Any, load: Any) -> None:
    tokenizer = load(build_tokenizer(tokenizer_source(metadata=bpe(add_bos_token=True, add_eos_token=True))))
    inner = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == tokenizer.encode("<|bos|>the") == [395, *inner, 396]
    assert tokenizer.encode("the<|eos|>") == [395, *inner, 396]
    assert tokenizer.encode("<|bos|>the", add_special_tokens=False) == [395, *inner]
    assert tokenizer.encode("<|bos|><|bos|>") == [395, 395, 396]  # a bos that the text itself repeats is the text's


def test_tokens_beyond_the_model_are_refused(built: BuiltTokenizer, load: Any) -> None:
    tokenizer = load(built, 399)
    assert tokenizer.encode("<|im_start|>")
    with pytest.raises(InvalidTokenError, match=r"token 399 \('<\|im_end\|>'\).*below 399"):
        tokenizer.encode("<|im_end|>")
    assert tokenizer.decode([399], skip_special_tokens=False) == "<|im_end|>"


def test_lone_surrogates_are_refused(tiny_bpe: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate U\+D83D at character 2"):
        tiny_bpe.encode("ab\ud83d")


# --- the guard before tokenisation ---
def test_guard_names_length_limit_and_derivation(smollm2: Tokenizer) -> None:
    text = "a" * 50_000_000
    with pytest.raises(PromptTooLongError) as error:
        smollm2.check_prompt_bytes(text, 8192)
    for part in ("50000000 bytes", "663552", "max_model_len 8192 tokens x 81 bytes"):
        assert part in str(error.value)


def test_guard_counts_bytes_and_accepts_the_limit(tiny_bpe: Tokenizer) -> None:
    longest = tiny_bpe.longest_token_bytes
    tiny_bpe.check_prompt_bytes("a" * (10 * longest), 10)
    with pytest.raises(PromptTooLongError):
        tiny_bpe.check_prompt_bytes("a" * (10 * longest + 1), 10)
    with pytest.raises(PromptTooLongError):
        tiny_bpe.check_prompt_bytes("é" * (5 * longest + 1), 10)


def test_longest_token_is_reached(tiny_bpe: Tokenizer, tiny_spm: Tokenizer) -> None:
    """The bound is tight: some token covers that many bytes."""
    for tokenizer in (tiny_bpe, tiny_spm):
        longest = max(
            len((tokenizer.id_to_token(i) or "").encode()) if tokenizer is tiny_spm else len(tokenizer.bytes_of(i))
            for i in range(tokenizer.vocab_size)
        )
        assert tokenizer.longest_token_bytes == longest


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("\x00\x01\x04\x06the fox\u2581\u0301éAЖ漢🙂<|im_end|>"), max_size=60))
def test_guard_never_refuses_what_fits(smollm2: Tokenizer, tiny_bpe: Tokenizer, tiny_spm: Tokenizer, text: str) -> None:
    for tokenizer in (smollm2, tiny_bpe, tiny_spm):
        tokenizer.check_prompt_bytes(text * 50, len(tokenizer.encode(text * 50)))


def test_guard_leaves_out_what_the_tokenizer_drops(
    smollm2: Tokenizer, tokenizer_source: Any, bpe: Any, load: Any
) -> None:
    dropped = "\x04\x06" * 100  # SmolLM2 has no tokens for these bytes
    assert smollm2.encode(dropped) == []
    smollm2.check_prompt_bytes(dropped, 1)
    built = build_tokenizer(tokenizer_source(metadata=bpe()))
    from tokenizers import AddedToken

    built.tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
    swallowing = load(built)
    text = " \u3000" * 500 + "<mask>" + "\n" * 500
    assert len(swallowing.encode(text)) == 1
    swallowing.check_prompt_bytes(text, 1)


def test_guard_is_off_where_text_can_vanish(tokenizer_source: Any, spm: Any, load: Any) -> None:
    metadata = spm()
    metadata["tokenizer.ggml.tokens"][3 + 0xC4] = "no byte token"  # so such characters fuse into one <unk>
    tokenizer = load(build_tokenizer(tokenizer_source(metadata=metadata)))
    text = "\u0107" * 1000
    assert len(tokenizer.encode(text)) < 5
    assert tokenizer.longest_token_bytes == 0
    tokenizer.check_prompt_bytes(text, 5)
