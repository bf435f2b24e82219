"""The contract between scheduler and model runner: one step is {request: number of tokens}.

Structs, because each step makes some: a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ..outputs import FinishReason
    from ..request import EngineCoreEvent, Request


class ScheduledRequest(msgspec.Struct, frozen=True):
    """One request of a step. The runner reads `request`, it never changes it."""

    request: Request
    num_computed_tokens: int  # tokens whose KV is in the cache before this step; the first token to compute
    num_scheduled_tokens: int  # tokens to compute now: token_ids[num_computed : num_computed + num_scheduled]
    block_ids: list[int]  # the request's block table, in order, long enough for this step's tokens

    @property
    def samples(self) -> bool:
        """Whether this step reaches the last known token, so that its logits give the next one."""
        return self.num_computed_tokens + self.num_scheduled_tokens == self.request.num_tokens


class SchedulerOutput(msgspec.Struct, frozen=True):
    """What to run in one step. Order of `scheduled`: running requests first, then admitted ones."""

    scheduled: list[ScheduledRequest]
    num_scheduled_tokens: dict[str, int]  # request id -> tokens, the same facts as `scheduled`
    total_num_scheduled_tokens: int
    scheduled_new_req_ids: list[str]  # first time scheduled
    scheduled_resumed_req_ids: list[str]  # scheduled again after a preemption
    scheduled_running_req_ids: list[str]
    preempted_req_ids: list[str]  # lost their blocks in this call
    finished_req_ids: set[str]  # finished since the previous call; the runner drops their state
    block_copies: list[tuple[int, int]]  # (from, to): KV blocks to copy before anything is computed, in this order


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of one sampled (or prompt) token, as the op Sample returns them."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]  # n most likely, by falling logprob
    top_logprobs: list[float]


class ModelRunnerOutput(msgspec.Struct):
    """Result of a step."""

    sampled_token_ids: dict[str, list[int]]  # only requests that sampled
    logprobs: dict[str, list[TokenLogprobs]] = {}  # aligned with sampled_token_ids
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}  # for prompt tokens reached now
    errors: dict[str, str] = {}  # requests that cannot go on, and why; they sampled nothing
    completed: bool = True  # False: the step wrote no KV that can be relied upon; all of its requests are in `errors`


class EngineCoreOutput(msgspec.Struct, frozen=True):
    """What a step brought for one request; sent when it got a token or finished, never for a mere prompt chunk."""

    request_id: str
    new_token_ids: list[int]  # empty only for a request that failed before it could sample
    finish_reason: FinishReason | None = None  # set on the last output of the request
    stop_reason: int | str | None = None  # the stop token id that matched; None for eos
    new_logprobs: list[TokenLogprobs] | None = None  # aligned with new_token_ids; None unless asked for
    new_prompt_logprobs: list[TokenLogprobs] | None = None  # whole prompt but its first token; first output only
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache
    events: list[EngineCoreEvent] = []  # since the request's previous output
    error: str | None = None  # complete sentence, with FinishReason.ERROR

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class SchedulerStats(msgspec.Struct, frozen=True):
    """State after a step. Counters (prefix_cache_*, num_preemptions) count from the start of the scheduler."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float  # 0 to 1
    prefix_cache_queries: int  # tokens that were looked up when requests were admitted, preempted ones apart
    prefix_cache_hits: int  # of which found
    num_preemptions: int
    num_scheduled_tokens: int  # of this step


class EngineCoreOutputs(msgspec.Struct, frozen=True):
    """Outputs of one step in the order of SchedulerOutput.scheduled, requests that failed last."""

    outputs: list[EngineCoreOutput]
    scheduler_stats: SchedulerStats
    timestamp: float  # time.monotonic(), seconds
