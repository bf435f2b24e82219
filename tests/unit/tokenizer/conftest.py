"""Tokenizers to test with: SmolLM2's own, tiny ones made here, and the cached ones where present."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level_bpe, sentencepiece_bpe
from trivet.exporters.checkpoint import open_checkpoint
from trivet.exporters.tokenizer import BuiltTokenizer, build_tokenizer
from trivet.runtime.tokenizer import Tokenizer

DATA = Path(__file__).parents[2] / "data"


@dataclass(frozen=True, slots=True)
class Source:
    """What build_tokenizer reads of a checkpoint."""

    kind: str = "gguf"
    metadata: dict[str, Any] = field(default_factory=dict)
    directory: Path = Path()
    config: dict[str, Any] = field(default_factory=dict)


def loaded(built: BuiltTokenizer, model_vocab_size: int | None = None) -> Tokenizer:
    size = built.tokenizer.get_vocab_size() if model_vocab_size is None else model_vocab_size
    return Tokenizer(built.tokenizer, built.spec, model_vocab_size=size, chat_template=built.chat_template)


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a tiny byte-level vocabulary; `changes` by the part of the key after tokenizer.ggml."""
    vocabulary = byte_level_bpe(400)
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": list(vocabulary.tokens),
        "token_type": [3 if i in vocabulary.specials else 1 for i in range(len(vocabulary.tokens))],
        "merges": [f"{a} {b}" for a, b in vocabulary.merges],
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """The same for a tiny SentencePiece vocabulary with byte tokens."""
    vocabulary = sentencepiece_bpe(400)
    types = [2, 3, 3, *(6 for _ in range(256))]
    values = {
        "model": "llama",
        "tokens": list(vocabulary.tokens),
        "scores": list(vocabulary.scores),
        "token_type": types + [1] * (len(vocabulary.tokens) - len(types)),
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.fixture(scope="session")
def from_metadata() -> Callable[[dict[str, Any]], BuiltTokenizer]:
    return lambda metadata: build_tokenizer(Source(metadata=metadata))


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    return dict(open_checkpoint(smollm2_path).metadata)


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return loaded(build_tokenizer(Source(metadata=smollm2_metadata)))


@pytest.fixture(scope="session")
def tiny_bpe() -> Tokenizer:
    return loaded(build_tokenizer(Source(metadata=bpe_metadata())))


@pytest.fixture(scope="session")
def tiny_spm() -> Tokenizer:
    return loaded(build_tokenizer(Source(metadata=spm_metadata())))


@pytest.fixture(scope="session")
def probes() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((DATA / "tokenizer_probes.json").read_text())
    return recorded


@pytest.fixture(scope="session")
def templates() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((DATA / "chat_templates.json").read_text())
    return recorded


@pytest.fixture(scope="session")
def tokenizer_source() -> type[Source]:
    return Source


@pytest.fixture(scope="session")
def bpe() -> Callable[..., dict[str, Any]]:
    return bpe_metadata


@pytest.fixture(scope="session")
def spm() -> Callable[..., dict[str, Any]]:
    return spm_metadata


@pytest.fixture(scope="session")
def load() -> Callable[..., Tokenizer]:
    return loaded
