"""Tokenizers of checkpoints, built as `tokenizers` objects: tokenizer.json, tokenizer.model and GGUF vocabularies."""

from __future__ import annotations

from .build import BuiltTokenizer, TokenizerSource, build_tokenizer
from .errors import TokenizerBuildError, UnknownPreTokenizerError

__all__ = ["BuiltTokenizer", "TokenizerBuildError", "TokenizerSource", "UnknownPreTokenizerError", "build_tokenizer"]
