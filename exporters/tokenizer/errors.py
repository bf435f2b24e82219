"""Errors of tokenizer building."""

from __future__ import annotations

from ..errors import ExportError


class TokenizerBuildError(ExportError):
    """The checkpoint's tokenizer is missing, malformed, or of a kind that trivet does not build."""


class UnknownPreTokenizerError(TokenizerBuildError):
    """`tokenizer.ggml.pre` (or --tokenizer-pre) names no pre-tokenizer that trivet knows."""
