"""Ids equal to llama.cpp, transformers and sentencepiece on the recorded texts (tools/record_tokenizer_probes.py)."""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from probe_vocabulary import probe_vocabulary
from tokenizers import Tokenizer as Backend
from trivet.exporters.checkpoint import open_checkpoint
from trivet.exporters.tokenizer import build_tokenizer
from trivet.exporters.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from trivet.runtime.tokenizer import Tokenizer

PRE_NAMES = (
    "default gpt-2 smollm qwen2 qwen35 llama-bpe dbrx glm4 minicpm5 tekken gpt-4o deepseek-llm deepseek-coder "
    "deepseek-v3 falcon bloom viking jais-2 bailingmoe seed-coder"
).split()


def without_second_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The recorded ids, but for the second bos that the oracles add to a text that has one; trivet never does."""
    return ids[1:] if tokenizer.spec.add_bos and ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def assert_ids(tokenizer: Tokenizer, texts: list[str], expected: list[list[int]]) -> None:
    assert len(texts) == len(expected) > 30
    got = {text: tokenizer.encode(text) for text in texts}
    want = {text: without_second_bos(ids, tokenizer) for text, ids in zip(texts, expected, strict=True)}
    assert got == want
    assert isinstance(tokenizer._backend, Backend)
    for text in texts:  # and what the ids stand for reads as the library itself reads it
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer._backend.decode(
            ids, skip_special_tokens=False
        )


def test_smollm2_ids_equal_llama_cpp(smollm2: Tokenizer, probes: dict[str, Any]) -> None:
    assert_ids(smollm2, probes["probes"] + probes["special_probes"]["smollm2"], probes["llama_cpp"]["smollm2"]["ids"])


@pytest.mark.parametrize("pre", PRE_NAMES)
def test_pre_tokenizer_splits_as_llama_cpp(
    pre: str, smollm2_metadata: dict[str, Any], probes: dict[str, Any], tokenizer_source: Any
) -> None:
    """One vocabulary under each name: a wrong split gives other ids."""
    vocabulary = {f"tokenizer.ggml.{key}": value for key, value in probe_vocabulary(smollm2_metadata).items()}
    built = build_tokenizer(tokenizer_source(metadata={**smollm2_metadata, **vocabulary, "tokenizer.ggml.pre": pre}))
    got = [built.tokenizer.encode(text, add_special_tokens=False).ids for text in probes["probes"]]
    assert dict(zip(probes["probes"], got, strict=True)) == dict(
        zip(probes["probes"], probes["llama_cpp_pre"][pre], strict=True)
    )


def test_every_family_of_pre_tokenizers_is_probed() -> None:
    """Names are aliases of few families; each family (split and settings) has a probed name."""
    probed = {PRE_TOKENIZERS[name].patterns for name in PRE_NAMES}
    assert {pre.patterns for pre in PRE_TOKENIZERS.values()} == probed


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["gemma-3-270m", "qwen2.5-coder-0.5b"])
def test_gguf_ids_equal_llama_cpp(
    name: str, real_model: Callable[[str], Path], probes: dict[str, Any], tokenizer_source: Any, load: Any
) -> None:
    metadata = dict(open_checkpoint(real_model(name)).metadata)
    tokenizer = load(build_tokenizer(tokenizer_source(metadata=metadata)))
    assert_ids(tokenizer, probes["probes"] + probes["special_probes"][name], probes["llama_cpp"][name]["ids"])


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "llama2", "gemma3", "deepseek-v3", "gpt-oss"])
def test_folder_ids_equal_transformers(
    name: str, real_model: Callable[[str], Path], probes: dict[str, Any], tokenizer_source: Any, load: Any
) -> None:
    folder = real_model(f"tok-{name}")
    tokenizer = load(build_tokenizer(tokenizer_source(kind="safetensors", directory=folder)))
    assert_ids(tokenizer, probes["probes"] + probes["special_probes"][name], probes["transformers"][name]["ids"])


@pytest.mark.real_models
@pytest.mark.parametrize(
    ("name", "pre"),
    [("llama3.1", "llama-bpe"), ("qwen3", "qwen2"), ("deepseek-v3", "deepseek-v3"), ("gpt-oss", "gpt-4o")],
)
def test_pre_tokenizer_equals_the_published_one(
    name: str, pre: str, real_model: Callable[[str], Path], probes: dict[str, Any], tokenizer_source: Any
) -> None:
    """The vocabulary of a tokenizer.json as GGUF would carry it, with the name for its pre-tokenizer."""
    whole = json.loads((real_model(f"tok-{name}") / "tokenizer.json").read_text())
    vocab = {**whole["model"]["vocab"], **{t["content"]: t["id"] for t in whole["added_tokens"]}}
    tokens = [f"[PAD{i}]" for i in range(max(vocab.values()) + 1)]
    for token, i in vocab.items():
        tokens[i] = token
    added = {t["id"] for t in whole["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in whole["model"]["merges"]]
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "add_bos_token": False}
    metadata["token_type"] = [3 if i in added else 1 for i in range(len(tokens))]
    built = build_tokenizer(tokenizer_source(metadata={f"tokenizer.ggml.{k}": v for k, v in metadata.items()}))
    original = Backend.from_file(str(real_model(f"tok-{name}") / "tokenizer.json"))
    for text in probes["probes"]:
        text = unicodedata.normalize("NFC", text)  # Qwen's file normalises; GGUF has no key for it
        got = built.tokenizer.encode(text, add_special_tokens=False).ids
        assert got == original.encode(text, add_special_tokens=False).ids, text


@pytest.mark.real_models
def test_model_file_ids_equal_sentencepiece(
    real_model: Callable[[str], Path], probes: dict[str, Any], tokenizer_source: Any, tmp_path: Path
) -> None:
    folder = real_model("tok-mistral")
    for file, expected in probes["sentencepiece"].items():
        copy = tmp_path / file
        copy.mkdir()
        (copy / "tokenizer.model").write_bytes((folder / file).read_bytes())
        built = build_tokenizer(tokenizer_source(kind="safetensors", directory=copy))
        assert built.spec.bos_token_id == 1 and built.spec.eos_token_ids == [2] and built.spec.add_bos
        got = [built.tokenizer.encode(text, add_special_tokens=False).ids for text in probes["probes"]]
        assert got == expected, file


@pytest.mark.parametrize("character", ["a", "\n", " ", "\t", "é", "🙂", "1", ".", "'"])
def test_64_kib_of_one_character_cost_no_quadratic_work(
    character: str, smollm2: Tokenizer, tiny_spm: Tokenizer, tiny_bpe: Tokenizer
) -> None:
    text = character * (65536 // len(character.encode()))
    for tokenizer in (smollm2, tiny_spm, tiny_bpe):
        started = time.process_time()
        ids = tokenizer.encode(text)
        assert time.process_time() - started < 2
        assert tokenizer.decode(ids) == text


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "llama2", "gemma3", "deepseek-v3", "gpt-oss"])
def test_64_kib_of_one_character_in_cached_tokenizers(
    name: str, real_model: Callable[[str], Path], tokenizer_source: Any, load: Any
) -> None:
    tokenizer = load(build_tokenizer(tokenizer_source(kind="safetensors", directory=real_model(f"tok-{name}"))))
    for character in "a\n é":
        started = time.process_time()
        tokenizer.encode(character * 65536)
        assert time.process_time() - started < 2
