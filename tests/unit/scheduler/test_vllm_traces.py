"""Our scheduler makes vLLM's decisions, step by step (traces recorded by tests/tools/record_vllm_traces.py)."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from trivet.runtime.config import SchedulerConfig
from trivet.runtime.request import Request, RequestStatus
from trivet.runtime.sampling_params import SamplingParams
from trivet.runtime.scheduler.output import ModelRunnerOutput
from trivet.runtime.scheduler.scheduler import Scheduler

TRACES = sorted((Path(__file__).parents[2] / "data" / "vllm_traces").glob("scheduler_*.json"))


def make_request(r: dict[str, Any]) -> Request:
    params = SamplingParams(
        max_tokens=r["max_tokens"],
        min_tokens=r.get("min_tokens", 0),
        ignore_eos=r.get("ignore_eos", False),
        stop_token_ids=r.get("stop_token_ids"),
        prompt_logprobs=r.get("prompt_logprobs"),
    )
    return Request(
        r["id"],
        r["prompt"],
        params,
        cache_salt=r.get("cache_salt"),
        eos_token_ids=[r["eos_token_id"]],
        arrival_time=0.0,
    )


def make_scheduler(w: dict[str, Any]) -> Scheduler:
    return Scheduler(
        SchedulerConfig(**w["scheduler_config"]),
        num_gpu_blocks=w["num_gpu_blocks"],
        block_size=w["block_size"],
        max_model_len=w["max_model_len"],
        enable_prefix_caching=w["enable_prefix_caching"],
    )


def free_queue_crc(scheduler: Scheduler) -> int:
    ids = [*scheduler.kv_cache_manager.block_pool.free_block_queue.ids()]
    return zlib.crc32(",".join(map(str, ids)).encode())


def replay_step(scheduler: Scheduler, sampled: dict[str, list[int]]) -> dict[str, Any]:
    """One step; the facts, in the form in which the recorder wrote vLLM's."""
    out = scheduler.schedule()
    tables = {s.request.request_id: list(s.block_ids) for s in out.scheduled}
    facts: dict[str, Any] = {
        "scheduled": out.num_scheduled_tokens,
        "new": out.scheduled_new_req_ids,
        "resumed": out.scheduled_resumed_req_ids,
        "preempted": sorted(out.preempted_req_ids),
        "finished": sorted(out.finished_req_ids),
        "running_after": [r.request_id for r in scheduler.running],
        "waiting_after": [r.request_id for r in scheduler.waiting],
        "blocks_crc": zlib.crc32(json.dumps(tables, sort_keys=True).encode()),
        "free_crc": free_queue_crc(scheduler),
    }
    assert out.total_num_scheduled_tokens == sum(out.num_scheduled_tokens.values())
    who_samples = {s.request.request_id for s in out.scheduled if s.samples}
    assert who_samples == set(sampled)  # vLLM got tokens for exactly these rows: no chunk samples
    result = scheduler.update_from_output(out, ModelRunnerOutput(sampled_token_ids=sampled))
    facts["tokens"] = {o.request_id: o.new_token_ids for o in result.outputs}
    facts["ended"] = {
        o.request_id: [str(o.finish_reason), o.stop_reason] for o in result.outputs if o.finish_reason is not None
    }
    facts["free_crc_after"] = free_queue_crc(scheduler)
    return facts


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_same_decisions_as_vllm(path: Path) -> None:
    trace = json.loads(path.read_text())
    workload = trace["workload"]
    scheduler = make_scheduler(workload)
    requests = {r["id"]: make_request(r) for r in workload["requests"]}
    for number, expected in enumerate(trace["facts"]):
        for r in workload["requests"]:
            if r["add_at"] == number:
                scheduler.add_request(requests[r["id"]])
            if r.get("abort_at") == number:
                scheduler.finish_requests(r["id"], RequestStatus.FINISHED_ABORTED)
        assert replay_step(scheduler, expected["tokens"]) == expected, f"step {number}"
        scheduler.kv_cache_manager.check_integrity()
    assert scheduler.get_num_unfinished_requests() == 0


def test_the_traces_exercise_what_they_are_for() -> None:
    facts = {path.stem: json.loads(path.read_text())["facts"] for path in TRACES}
    assert len(facts) == 12
    for name in ("scheduler_preempt_uncached", "scheduler_preempt_cached", "scheduler_no_full_reserve"):
        assert sum(len(step["preempted"]) for step in facts[name]) >= 3, name
        assert any(step["resumed"] for step in facts[name]), name
    assert facts["scheduler_coschedule"][0]["new"] == ["r0", "r1"]
    reasons = [reason for step in facts["scheduler_mixed"] for reason in step["ended"].values()]
    assert {tuple(reason) for reason in reasons} >= {("stop", None), ("stop", 3), ("length", None)}
