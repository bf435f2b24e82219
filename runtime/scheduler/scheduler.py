"""The scheduler: which requests compute how many tokens in the next step.

There are no prefill and decode phases. A request has tokens (prompt + output) and computed tokens; each step tries to
let the second catch up with the first, running requests first, then waiting ones, within one budget of tokens. Chunked
prefill, decode, prefix hits and recomputation after a preemption are all this one rule.

Protocol of a step: `out = schedule()`, run the model on `out`, `update_from_output(out, result)`; the latter also when
`out` is empty. `add_request` and `finish_requests` may come at any moment between these calls, from the same thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..kv_cache.block_hash import make_block_hasher
from ..kv_cache.manager import KVCacheManager
from ..request import EngineCoreEventType, Request, RequestStatus
from .output import (
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from .request_queue import FCFSRequestQueue

if TYPE_CHECKING:
    from ..config import SchedulerConfig


def check_stop(request: Request, max_model_len: int) -> bool:
    """Whether the last output token ends the request; sets status and stop_reason if so.

    Before min_tokens neither eos nor a stop token ends it; the length limits always do.
    """
    params = request.sampling_params
    last_token_id = request.output_token_ids[-1]
    if request.num_output_tokens >= params.min_tokens:
        if not params.ignore_eos and last_token_id in request.eos_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if params.stop_token_ids and last_token_id in params.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = last_token_id
            return True
    at_max_tokens = request.max_tokens is not None and request.num_output_tokens >= request.max_tokens
    if at_max_tokens or request.num_tokens >= max_model_len:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False


class _Step:
    """What one schedule() call has decided so far."""

    __slots__ = ("new", "num_scheduled_tokens", "preempted", "resumed", "running", "scheduled", "token_budget")

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.scheduled: list[ScheduledRequest] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.new: list[str] = []
        self.resumed: list[str] = []
        self.running: list[str] = []
        self.preempted: list[str] = []


class Scheduler:
    """FCFS. Pure Python; knows nothing of devices or models."""

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        *,
        num_gpu_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        copy_block_heads: bool = False,
    ) -> None:
        """`num_gpu_blocks` counts the null block. The config has been validated (no policy but fcfs, ...).

        copy_block_heads: the runner does SchedulerOutput.block_copies. Without, decisions are vLLM's.
        """
        self.scheduler_config = scheduler_config
        self.max_num_running_reqs = scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = scheduler_config.max_num_batched_tokens
        self.max_model_len = max_model_len
        self.kv_cache_manager = KVCacheManager(
            num_gpu_blocks=num_gpu_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            enable_caching=enable_prefix_caching,
            copy_block_heads=copy_block_heads,
            watermark=scheduler_config.watermark,
        )
        self._block_hasher = make_block_hasher(block_size) if enable_prefix_caching else None
        self.requests: dict[str, Request] = {}  # all unfinished ones
        self.waiting = FCFSRequestQueue()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._finished_req_ids: set[str] = set()  # since the last schedule(), for the runner
        self._failed: list[EngineCoreOutput] = []  # outputs that the next update_from_output() hands out
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}  # of prompts that are being computed

    # --- requests come and go -------------------------------------------------------------------------------------
    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError when an unfinished one has the same id."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use; ids of unfinished requests must differ")
        request.set_block_hasher(self._block_hasher)
        request.record_event(EngineCoreEventType.QUEUED)
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, status: RequestStatus) -> list[Request]:
        """End requests from outside (abort, a stop string); None = all. Returns those that this call ended.

        Unknown ids and finished requests are passed over: the end may have come while the call was under way. No
        EngineCoreOutput follows. Raises ValueError when `status` is not a final one.
        """
        if not status.is_finished:
            raise ValueError(f"finish_requests needs a final status, got {status.name}")
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        self._remove_from_queues(ended)
        for request in ended:
            request.status = status
            self._free_request(request)
        return ended

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def has_requests(self) -> bool:
        """Whether another step has something to do: compute, hand out a failure, or tell the runner of an end."""
        return bool(self.requests or self._finished_req_ids or self._failed)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while a request holds KV blocks."""
        return self.kv_cache_manager.reset_prefix_cache()

    # --- the step -------------------------------------------------------------------------------------------------
    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step, allocate their KV slots and count them as computed."""
        timestamp = time.monotonic()
        step = _Step(self.max_num_scheduled_tokens)
        self.kv_cache_manager.begin_step()
        self._schedule_running(step, timestamp)
        if not step.preempted:
            self._schedule_waiting(step, timestamp)
        for item in step.scheduled:
            item.request.num_computed_tokens += item.num_scheduled_tokens
        finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        return SchedulerOutput(
            scheduled=step.scheduled,
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=self.max_num_scheduled_tokens - step.token_budget,
            scheduled_new_req_ids=step.new,
            scheduled_resumed_req_ids=step.resumed,
            scheduled_running_req_ids=step.running,
            preempted_req_ids=step.preempted,
            finished_req_ids=finished_req_ids,
            block_copies=self.kv_cache_manager.take_block_copies(),
        )

    def _schedule_running(self, step: _Step, timestamp: float) -> None:
        index = 0
        while index < len(self.running) and step.token_budget > 0:
            request = self.running[index]
            request.num_computed_tokens += self.kv_cache_manager.extend_prefix_hit(request)
            num_new_tokens = min(self._wanted_tokens(request, request.num_computed_tokens), step.token_budget)
            if not self._allocate_or_preempt(request, num_new_tokens, step, timestamp):
                break
            self._take(request, num_new_tokens, step)
            step.running.append(request.request_id)
            index += 1

    def _wanted_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens this step would give the request if the budget allowed it."""
        num_new_tokens = request.num_tokens - num_computed_tokens
        threshold = self.scheduler_config.long_prefill_token_threshold
        return threshold if 0 < threshold < num_new_tokens else num_new_tokens

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int, step: _Step, timestamp: float) -> bool:
        """Slots for a running request, at the cost of the last ones in `running`. False: `request` went itself."""
        while self.kv_cache_manager.allocate_slots(request, num_new_tokens) is None:
            victim = self.running.pop()
            self._preempt_request(victim, timestamp)
            step.preempted.append(victim.request_id)
            if victim is request:
                return False
        return True

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        """Back to the front of the queue without its blocks; the caller has taken it out of `running`."""
        self.kv_cache_manager.free(request)
        self._prompt_logprobs.pop(request.request_id, None)  # the prompt is computed anew
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.record_event(EngineCoreEventType.PREEMPTED, timestamp)
        self.waiting.prepend_request(request)

    def _schedule_waiting(self, step: _Step, timestamp: float) -> None:
        """Admit from the front of the queue, until one does not fit: nobody overtakes."""
        while self.waiting and step.token_budget > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.peek_request()
            if error := self._why_it_never_fits(request):
                self.waiting.pop_request()
                self._fail_request(request, error)
                continue
            hits, num_hits = self.kv_cache_manager.get_computed_blocks(request)
            head = self.kv_cache_manager.get_block_head(request, hits)
            if 2 * (head.num_tokens_soon - head.num_tokens) >= self.kv_cache_manager.block_size:
                break  # this step computes half a block or more that the next one can copy
            num_hits += head.num_tokens
            num_new_tokens = self._wanted_tokens(request, num_hits)
            if not self.scheduler_config.enable_chunked_prefill and num_new_tokens > step.token_budget:
                break
            num_new_tokens = min(num_new_tokens, step.token_budget)
            new_blocks = self.kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
                new_computed_blocks=hits,
                head=head,
                full_sequence_must_fit=self.scheduler_config.scheduler_reserve_full_isl,
                has_scheduled_reqs=bool(self.running),
            )
            if new_blocks is None:
                break
            self.waiting.pop_request()
            self._admit(request, num_hits, step, timestamp)
            self._take(request, num_new_tokens, step)

    def _admit(self, request: Request, num_hits: int, step: _Step, timestamp: float) -> None:
        self.kv_cache_manager.record_prefix_query(request, num_hits)
        if request.status == RequestStatus.PREEMPTED:
            step.resumed.append(request.request_id)
        else:
            step.new.append(request.request_id)
            request.num_cached_tokens = num_hits
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hits
        request.record_event(EngineCoreEventType.SCHEDULED, timestamp)
        self.running.append(request)

    def _take(self, request: Request, num_new_tokens: int, step: _Step) -> None:
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        step.scheduled.append(ScheduledRequest(request, request.num_computed_tokens, num_new_tokens, block_ids))
        step.num_scheduled_tokens[request.request_id] = num_new_tokens
        step.token_budget -= num_new_tokens

    # --- requests that can never run ------------------------------------------------------------------------------
    def _why_it_never_fits(self, request: Request) -> str | None:
        """A request that would wait for ever would also hold up everyone behind it."""
        if request.num_tokens >= self.max_model_len:
            return (
                f"the prompt has {request.num_tokens} tokens; max_model_len is {self.max_model_len} and one position "
                "at least is needed for output"
            )
        if not self.kv_cache_manager.can_ever_fit(request.num_tokens):
            capacity = self.kv_cache_manager.block_pool.num_usable_blocks * self.kv_cache_manager.block_size
            return (
                f"the request has {request.num_tokens} tokens ({request.num_prompt_tokens} of them prompt) and the "
                f"whole KV cache holds {capacity}: raise kv_cache_memory_bytes or lower max_tokens"
            )
        return None

    def _fail_request(self, request: Request, error: str) -> None:
        """End a request that is in no queue; its output goes out with the next update_from_output()."""
        request.status = RequestStatus.FINISHED_ERROR
        request.error = error
        self._free_request(request)
        self._failed.append(self._make_output(request, []))

    # --- results --------------------------------------------------------------------------------------------------
    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Append sampled tokens, end requests that are done and free their blocks.

        Requests that were ended from outside since schedule() are passed over, those that the runner gave up fail
        alone. Raises RuntimeError when the runner returned tokens for a prompt chunk or none for a request that had to
        sample.
        """
        outputs: list[EngineCoreOutput] = []
        stopped: list[Request] = []
        if not runner_output.completed:
            self.kv_cache_manager.forget_step(scheduler_output.scheduled)
        for item in scheduler_output.scheduled:
            request = item.request
            if request.is_finished:
                continue
            request_id = request.request_id
            if error := runner_output.errors.get(request_id):
                self._remove_from_queues([request])
                self._fail_request(request, error)
                continue
            new_token_ids = runner_output.sampled_token_ids.get(request_id, [])
            if bool(new_token_ids) != item.samples:
                raise RuntimeError(
                    f"request {request_id!r}: the runner returned {len(new_token_ids)} sampled tokens for a step that "
                    f"{'reaches' if item.samples else 'does not reach'} the last known token"
                )
            if request_id in runner_output.prompt_logprobs:
                self._collect_prompt_logprobs(request, runner_output.prompt_logprobs[request_id])
            if not new_token_ids:
                continue
            new_token_ids = self._append_until_stop(request, new_token_ids)
            if request.is_finished:
                stopped.append(request)
            outputs.append(self._make_output(request, new_token_ids, runner_output.logprobs.get(request_id)))
        self._remove_from_queues(stopped)
        for request in stopped:
            self._free_request(request)
        outputs.extend(self._failed)
        self._failed = []
        return EngineCoreOutputs(
            outputs, self.make_stats(scheduler_output.total_num_scheduled_tokens), time.monotonic()
        )

    def _append_until_stop(self, request: Request, new_token_ids: list[int]) -> list[int]:
        """The tokens that were appended: up to and with the one that ends the request."""
        for i, token_id in enumerate(new_token_ids, 1):
            request.append_output_token_ids(token_id)
            if check_stop(request, self.max_model_len):
                return new_token_ids[:i]
        return new_token_ids

    def _collect_prompt_logprobs(self, request: Request, logprobs: list[TokenLogprobs]) -> None:
        """Chunk by chunk; a prompt that is computed again after it was handed out is not collected twice."""
        if request.num_output_tokens == 0:
            self._prompt_logprobs.setdefault(request.request_id, []).extend(logprobs)

    def _make_output(
        self, request: Request, new_token_ids: list[int], logprobs: list[TokenLogprobs] | None = None
    ) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            new_logprobs=None if logprobs is None else logprobs[: len(new_token_ids)],
            new_prompt_logprobs=self._prompt_logprobs.pop(request.request_id, None),
            num_cached_tokens=request.num_cached_tokens,
            events=request.take_events(),
            error=request.error,
        )

    def make_stats(self, num_scheduled_tokens: int = 0) -> SchedulerStats:
        prefix = self.kv_cache_manager.prefix_cache_stats
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_queries=prefix.queries,
            prefix_cache_hits=prefix.hits,
            num_preemptions=self.num_preemptions,
            num_scheduled_tokens=num_scheduled_tokens,
        )

    # --- bookkeeping ----------------------------------------------------------------------------------------------
    def _remove_from_queues(self, requests: list[Request]) -> None:
        if not requests:
            return
        gone = set(requests)
        self.running = [r for r in self.running if r not in gone]
        if any(r in gone for r in self.waiting):
            self.waiting.remove_requests(gone)

    def _free_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        self._finished_req_ids.add(request.request_id)
        self._prompt_logprobs.pop(request.request_id, None)
        del self.requests[request.request_id]
