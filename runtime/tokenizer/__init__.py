"""Text to token ids and back: tokenizer, incremental detokeniser, chat templates. Import loads none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chat_template import ChatTemplate as ChatTemplate
    from .detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
    from .errors import ChatTemplateError as ChatTemplateError
    from .errors import InvalidTokenError as InvalidTokenError
    from .errors import MissingChatTemplateError as MissingChatTemplateError
    from .errors import PromptTooLongError as PromptTooLongError
    from .errors import TokenizerLoadError as TokenizerLoadError
    from .tokenizer import Tokenizer as Tokenizer

_HOME = {
    "ChatTemplate": "chat_template",
    "ChatTemplateError": "errors",
    "IncrementalDetokenizer": "detokenizer",
    "InvalidTokenError": "errors",
    "MissingChatTemplateError": "errors",
    "PromptTooLongError": "errors",
    "Tokenizer": "tokenizer",
    "TokenizerLoadError": "errors",
}
# What a chat template is given of the conversation itself; variables of a caller must not have these names.
CONVERSATION_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize")
)
__all__ = ["CONVERSATION_VARIABLES", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)
