"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from ....runtime.outputs import Logprob, PositionLogprobs

_FLOOR = -9999.0  # JSON has no -inf


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, _FLOOR)


def _text(token_id: int, logprob: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else logprob.decoded_token or ""


def _bytes(token: str) -> list[int]:
    return list(token.encode("utf-8", errors="replace"))


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs] | None, num_top: int, as_ids: bool
) -> ChatLogprobs | None:
    """One entry per token: its own log-probability and those of the `num_top` most likely."""
    if positions is None:
        return None
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        own = position[token_id]
        token = _text(token_id, own, as_ids)
        top = [(i, lp) for i, lp in position.items() if lp.rank is not None and lp.rank <= num_top]
        top.sort(key=lambda item: item[1].rank or 0)
        content.append(
            TokenLogprob(
                token=token,
                logprob=_value(own),
                bytes=_bytes(token),
                top_logprobs=[
                    TopLogprob(token=_text(i, lp, as_ids), logprob=_value(lp), bytes=_bytes(_text(i, lp, as_ids)))
                    for i, lp in top
                ],
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    *,
    as_ids: bool,
    offset: int,
    decode: Callable[[int], str],
) -> CompletionLogprobs:
    """Parallel lists. A position of None (the first prompt token) has no log-probability; `decode` gives its text.

    `offset`: characters of the choice's text before the first token.
    """
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, position in zip(token_ids, positions, strict=True):
        if position is None:
            token = f"token_id:{token_id}" if as_ids else decode(token_id)
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            token = _text(token_id, position[token_id], as_ids)
            result.token_logprobs.append(_value(position[token_id]))
            result.top_logprobs.append({_text(i, lp, as_ids): _value(lp) for i, lp in position.items()})
        result.tokens.append(token)
        result.text_offset.append(offset)
        offset += len(token)
    return result


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: per prompt token, token id -> logprob, rank, decoded_token."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _value(lp), "rank": lp.rank, "decoded_token": lp.decoded_token}
            for token_id, lp in position.items()
        }
        for position in positions
    ]
