"""Errors of the tokenizer package."""

from __future__ import annotations

from ..errors import InvalidRequestError, ModelLoadError


class TokenizerLoadError(ModelLoadError):
    """The package's tokenizer cannot be read, or works in a way that trivet cannot undo token by token."""


class PromptTooLongError(InvalidRequestError):
    """A prompt of so many bytes that it cannot fit the context, whatever its tokens."""


class InvalidTokenError(InvalidRequestError):
    """A token id or token that the model does not have."""


class ChatTemplateError(InvalidRequestError):
    """A chat template that does not compile, refuses the conversation, or fails on it."""


class MissingChatTemplateError(ChatTemplateError):
    """A chat request for a model without a chat template."""
