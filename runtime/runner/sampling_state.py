"""A request's sampling parameters as rows of the op Sample's inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..request import Request

# Inputs of Sample that are ragged lists over rows, and their dtypes.
ROW_LISTS: Final[dict[str, type[np.generic]]] = {
    "token_history": np.int32,
    "allowed_token_ids": np.int32,
    "banned_token_ids": np.int32,
    "bias_token_ids": np.int32,
    "bias_values": np.float32,
}
NO_TOKEN_LEFT: Final = (
    "no token is left to generate: bad_words, and the stop tokens that min_tokens bans, exclude every allowed token"
)


class SamplingState:
    """Constant rows of one request, and the lists that change from step to step.

    floats, ints: columns as in contract SAMPLING_FLOATS / SAMPLING_INTS; `offset` and `forced_token_id` are per step.
    num_logprobs, num_prompt_logprobs: -1 = none wanted, else how many (the whole vocabulary is already spelled out).
    """

    __slots__ = (
        "allowed",
        "bad_words",
        "bias",
        "floats",
        "has_lists",
        "ints",
        "min_tokens",
        "num_logprobs",
        "num_prompt_logprobs",
        "stop_token_ids",
        "uses_penalties",
        "vocab_size",
    )

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.sampling_params
        if params.seed is None:
            raise ValueError(f"request {request.request_id}: the engine draws a seed before a request is scheduled")
        self.vocab_size = vocab_size
        self.num_logprobs = _widen(params.logprobs, vocab_size)
        self.num_prompt_logprobs = _widen(params.prompt_logprobs, vocab_size)
        self.floats = np.array(
            [
                params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            ],
            np.float32,
        )
        self.uses_penalties = params.uses_penalties
        num_history_prompt = request.num_prompt_tokens if self.uses_penalties else 0  # no history row without penalties
        self.ints = np.array([params.top_k, params.seed, 0, self.num_logprobs, -1, num_history_prompt], np.int64)
        self.allowed = np.array(sorted(set(params.allowed_token_ids or ())), np.int32)  # np.unique imports 16 ms more
        self.bad_words = params.bad_words_token_ids
        self.min_tokens = params.min_tokens
        self.stop_token_ids = np.array(sorted(params.all_stop_token_ids), np.int32)
        bias = params.logit_bias or {}
        self.bias = np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)
        self.has_lists = bool(
            self.uses_penalties or self.allowed.size or self.bad_words or self.min_tokens or self.bias[0].size
        )

    def row_lists(self, request: Request) -> Iterator[tuple[str, NDArray[Any]]]:
        """The non-empty lists of the next token to draw, by input name."""
        if self.uses_penalties:
            yield "token_history", request.token_ids_np[: request.num_tokens]
        if self.allowed.size:
            yield "allowed_token_ids", self.allowed
        if request.num_output_tokens < self.min_tokens:
            yield "banned_token_ids", self.stop_token_ids
        if self.bad_words:
            yield "banned_token_ids", np.array(self._banned_last_tokens(request), np.int32)
        if self.bias[0].size:
            yield "bias_token_ids", self.bias[0]
            yield "bias_values", self.bias[1]

    def leaves_nothing(self, lists: list[tuple[str, NDArray[Any]]]) -> bool:
        """Whether the banned tokens of `lists` (from row_lists) are all that may be drawn."""
        banned = [values for name, values in lists if name == "banned_token_ids"]
        num_banned = sum(map(len, banned))
        if not num_banned or num_banned < (self.allowed.size or self.vocab_size):
            return False
        if self.allowed.size:
            return not np.setdiff1d(self.allowed, np.concatenate(banned)).size
        return len(np.unique(np.concatenate(banned))) == self.vocab_size

    def _banned_last_tokens(self, request: Request) -> list[int]:
        """Last tokens of the bad words whose other tokens are the end of the output."""
        output = request.token_ids_np[request.num_prompt_tokens : request.num_tokens]
        banned = []
        for *prefix, last in self.bad_words:
            if not prefix or (len(prefix) <= len(output) and output[-len(prefix) :].tolist() == prefix):
                banned.append(last)
        return banned


def _widen(num_logprobs: int | None, vocab_size: int) -> int:
    """-1 (the whole vocabulary) as a count; None as the contract's -1."""
    if num_logprobs is None:
        return -1
    return vocab_size if num_logprobs == -1 else num_logprobs
