"""Drives a scheduler as an engine would, with a made-up model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trivet.runtime.config import SchedulerConfig
from trivet.runtime.request import Request
from trivet.runtime.sampling_params import SamplingParams
from trivet.runtime.scheduler.output import (
    EngineCoreOutputs,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from trivet.runtime.scheduler.scheduler import Scheduler

EOS = 2


def make_scheduler(
    *, budget: int = 64, max_num_seqs: int = 8, num_gpu_blocks: int = 100, block_size: int = 4,
    max_model_len: int = 128, caching: bool = True, copy_block_heads: bool = False, **config: Any,
) -> Scheduler:  # fmt: skip
    return Scheduler(
        SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, **config),
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        enable_prefix_caching=caching,
        copy_block_heads=copy_block_heads,
    )


def make_request(request_id: str, prompt: int | list[int], *, cache_salt: str | None = None, **params: Any) -> Request:
    ids = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    params.setdefault("max_tokens", 8)
    return Request(request_id, ids, SamplingParams(**params), cache_salt=cache_salt, eos_token_ids=[EOS])


def finish_step(scheduler: Scheduler, out: SchedulerOutput, token: int = 7) -> EngineCoreOutputs:
    """What a model would do that samples `token` everywhere."""
    sampled = {s.request.request_id: [token] for s in out.scheduled if s.samples}
    prompt_logprobs = {
        s.request.request_id: logprobs_of_chunk(s)
        for s in out.scheduled
        if s.request.sampling_params.prompt_logprobs is not None
    }
    return scheduler.update_from_output(out, ModelRunnerOutput(sampled, prompt_logprobs=prompt_logprobs))


def step(scheduler: Scheduler, token: int = 7) -> tuple[SchedulerOutput, EngineCoreOutputs]:
    out = scheduler.schedule()
    return out, finish_step(scheduler, out, token)


def run_until_done(scheduler: Scheduler, limit: int = 500) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(limit):
        if not scheduler.has_requests():
            return tokens
        for output in step(scheduler)[1].outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        scheduler.kv_cache_manager.check_integrity()
    raise AssertionError(f"still unfinished: {scheduler.requests}")


def logprobs_of(ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(i, -1.0, 1, [i], [-1.0]) for i in ids]


def logprobs_of_chunk(s: ScheduledRequest) -> list[TokenLogprobs]:
    """Of the prompt tokens after the ones that are computed, as the runner returns them."""
    end = min(s.num_computed_tokens + s.num_scheduled_tokens + 1, s.request.num_prompt_tokens)
    return logprobs_of(s.request.all_token_ids[s.num_computed_tokens + 1 : end])
