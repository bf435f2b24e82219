"""The entry point: a checkpoint in, a tokenizer with its facts out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from ...backends.contract.manifest import TokenizerSpec
from .errors import TokenizerBuildError


class TokenizerSource(Protocol):
    """What of a checkpoint the tokenizer needs."""

    @property
    def kind(self) -> str: ...  # "gguf" | "safetensors"
    @property
    def metadata(self) -> dict[str, Any]: ...  # GGUF key -> value; empty for safetensors
    @property
    def directory(self) -> Path: ...  # folder with tokenizer.json and its companions (safetensors)
    @property
    def config(self) -> dict[str, Any]: ...  # config.json, {} without one


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    """A tokenizer ready for `Tokenizer.save`, and what the manifest says about it."""

    tokenizer: Tokenizer
    spec: TokenizerSpec
    chat_template: str | None  # the default template; named ones are in spec.chat_templates


def build_tokenizer(checkpoint: TokenizerSource, *, pre_override: str | None = None) -> BuiltTokenizer:
    """Build the tokenizer of `checkpoint`.

    `pre_override` (flag --tokenizer-pre) replaces `tokenizer.ggml.pre` of a GGUF byte-level vocabulary; it is refused
    where no such key is in play. Raises TokenizerBuildError, with the file or key, what it holds and what was expected.
    """
    if checkpoint.kind == "gguf":
        from .gguf import build_from_gguf

        return build_from_gguf(checkpoint.metadata, pre_override)
    if pre_override is not None:
        raise TokenizerBuildError(
            f"--tokenizer-pre {pre_override}: only GGUF vocabularies have a pre-tokenizer name; "
            f"{checkpoint.directory} carries its tokenizer as files. Leave the flag out"
        )
    directory = checkpoint.directory
    if (directory / "tokenizer.json").is_file():
        from .huggingface import build_from_tokenizer_json

        return build_from_tokenizer_json(directory, checkpoint.config)
    if (directory / "tokenizer.model").is_file():
        from .sentencepiece import build_from_sentencepiece

        return build_from_sentencepiece(directory, checkpoint.config)
    raise TokenizerBuildError(
        f"{directory}: no tokenizer found; expected tokenizer.json, or a SentencePiece tokenizer.model"
    )
