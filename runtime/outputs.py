"""What callers receive: RequestOutput and its parts. Field names are those of vLLM's public outputs."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why generation ended; the value is the OpenAI `finish_reason`."""

    STOP = "stop"  # eos token, stop token id or stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"
    ERROR = "error"


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at one position."""

    logprob: float  # nats, of the raw logits
    rank: int | None  # 1 = most likely of the whole vocabulary
    decoded_token: str | None


# One position: token id -> Logprob; the sampled (or prompt) token comes first, then the top n by rank.
PositionLogprobs = dict[int, Logprob]


class CompletionOutput(msgspec.Struct):
    """One completion of a request; under RequestOutputKind.DELTA only what is new since the last one."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None = None  # a FinishReason value
    stop_reason: int | str | None = None  # the stop token id or stop string that matched; None for eos

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct):
    """Monotonic clock, seconds. None = has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None


class RequestOutput(msgspec.Struct):
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # [0] is None: nothing precedes the first token
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    metrics: RequestMetrics | None = None
    error: str | None = None  # set with finish_reason "error"
    warnings: list[str] = []  # what was adjusted (a clamped temperature, ...)
