"""Chat messages as the tokenizer's chat template takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .requests import ChatMessage


def to_conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Plain dicts without what was left out; contents stay strings or lists of parts, which the tokenizer converts."""
    return [message.model_dump(exclude_none=True) for message in messages]
