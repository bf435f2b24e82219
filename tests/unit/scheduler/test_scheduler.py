"""Rules of the scheduler, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from trivet.runtime.outputs import FinishReason
from trivet.runtime.request import EngineCoreEventType, RequestStatus
from trivet.runtime.scheduler.output import ModelRunnerOutput, SchedulerOutput
from trivet.runtime.scheduler.scheduler import Scheduler

from .driver import EOS, finish_step, logprobs_of, logprobs_of_chunk, make_request, make_scheduler, run_until_done, step


def test_two_prefills_that_fit_the_budget_run_in_one_step() -> None:
    scheduler = make_scheduler(budget=64)
    scheduler.add_request(make_request("a", [1] * 30))
    scheduler.add_request(make_request("b", [2] * 30))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 30, "b": 30}


def test_running_requests_come_first_and_prefill_fills_the_rest() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add_request(make_request("a", 4))
    step(scheduler)
    scheduler.add_request(make_request("b", [*range(500, 540)]))
    out, _ = step(scheduler)
    assert out.num_scheduled_tokens == {"a": 1, "b": 15}
    assert (out.scheduled_running_req_ids, out.scheduled_new_req_ids) == (["a"], ["b"])
    assert out.total_num_scheduled_tokens == 16


def test_a_long_prompt_is_chunked_and_only_its_last_chunk_gives_an_output() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add_request(make_request("a", 25))
    chunks, outputs = [], []
    for _ in range(3):
        out, result = step(scheduler)
        chunks.append(out.num_scheduled_tokens["a"])
        outputs.append([o.new_token_ids for o in result.outputs])
    assert chunks == [10, 10, 5]
    assert outputs == [[], [], [[7]]]


def test_a_token_for_a_chunk_row_is_an_error_of_the_runner() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add_request(make_request("a", 25))
    out = scheduler.schedule()
    with pytest.raises(RuntimeError, match="'a': the runner returned 1 sampled tokens"):
        scheduler.update_from_output(out, ModelRunnerOutput(sampled_token_ids={"a": [7]}))


def test_max_num_seqs_bounds_the_running_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for i in range(3):
        scheduler.add_request(make_request(f"r{i}", 3))
    step(scheduler)
    stats = scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 1)


@pytest.mark.parametrize(
    ("params", "sampled", "num_tokens", "reason", "stop_reason"),
    [
        ({"max_tokens": 3}, 7, 3, FinishReason.LENGTH, None),
        ({}, EOS, 1, FinishReason.STOP, None),
        ({"ignore_eos": True, "max_tokens": 4}, EOS, 4, FinishReason.LENGTH, None),
        ({"min_tokens": 3}, EOS, 3, FinishReason.STOP, None),
        ({"stop_token_ids": [9]}, 9, 1, FinishReason.STOP, 9),
        ({"stop_token_ids": [9], "min_tokens": 2}, 9, 2, FinishReason.STOP, 9),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS, 1, FinishReason.STOP, EOS),
        ({"max_tokens": None}, 7, 118, FinishReason.LENGTH, None),  # max_model_len 128
    ],
)
def test_stop(
    params: dict[str, Any], sampled: int, num_tokens: int, reason: FinishReason, stop_reason: int | None
) -> None:
    scheduler = make_scheduler()
    request = make_request("a", 10, **params)
    scheduler.add_request(request)
    outputs = []
    while scheduler.get_num_unfinished_requests():
        outputs += step(scheduler, sampled)[1].outputs
    assert request.num_output_tokens == num_tokens
    assert [o.finish_reason for o in outputs] == [None] * (num_tokens - 1) + [reason]
    assert outputs[-1].stop_reason == stop_reason
    assert scheduler.make_stats().kv_cache_usage == 0


def test_finished_requests_are_reported_to_the_runner_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5, max_tokens=1))
    step(scheduler)
    assert scheduler.get_num_unfinished_requests() == 0
    assert scheduler.has_requests()
    assert step(scheduler)[0].finished_req_ids == {"a"}
    assert not scheduler.has_requests()
    assert step(scheduler)[0].finished_req_ids == set()


def test_abort_while_the_step_runs_discards_its_token() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 5))
    out = scheduler.schedule()
    ended = scheduler.finish_requests(["a", "unknown"], RequestStatus.FINISHED_ABORTED)
    assert [r.request_id for r in ended] == ["a"]
    assert [o.request_id for o in finish_step(scheduler, out).outputs] == ["b"]
    assert scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED) == []


def test_abort_of_all_frees_everything() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for i in range(5):
        scheduler.add_request(make_request(f"r{i}", 5))
    step(scheduler)
    assert len(scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)) == 5
    assert scheduler.get_num_unfinished_requests() == 0
    assert scheduler.make_stats().kv_cache_usage == 0


def test_finish_needs_a_final_status_and_ids_are_unique() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5))
    with pytest.raises(ValueError, match="final status, got WAITING"):
        scheduler.finish_requests("a", RequestStatus.WAITING)
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add_request(make_request("a", 5))


def test_preemption_takes_the_tail_and_resumes_it_first() -> None:
    # 3 requests of 8 tokens hold 2 blocks each; the pool has 6, so the first one to need a third evicts the last.
    scheduler = make_scheduler(num_gpu_blocks=7, caching=False)
    requests = [make_request(name, [i] * 8, max_tokens=4) for i, name in enumerate("abc", 10)]
    for request in requests:
        scheduler.add_request(request)
    step(scheduler)
    out, _ = step(scheduler)
    assert out.preempted_req_ids == ["c"]
    assert out.num_scheduled_tokens == {"a": 1, "b": 1}
    assert (requests[2].status, requests[2].num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    scheduler.add_request(make_request("d", 4))
    assert [r.request_id for r in scheduler.waiting] == ["c", "d"]
    resumed = []
    tokens: dict[str, int] = {}
    while scheduler.has_requests():
        out, result = step(scheduler)
        resumed += out.scheduled_resumed_req_ids
        for output in result.outputs:
            tokens[output.request_id] = tokens.get(output.request_id, 0) + len(output.new_token_ids)
    assert resumed == ["c"]
    assert tokens == {"a": 2, "b": 2, "c": 3, "d": 8}  # and two, two, one before
    assert scheduler.make_stats().num_preemptions == 1


def test_a_return_from_preemption_is_no_prefix_query() -> None:
    scheduler = make_scheduler(num_gpu_blocks=7)
    for i, name in enumerate("abc", 10):
        scheduler.add_request(make_request(name, [i] * 8, max_tokens=4))
    run_until_done(scheduler)
    stats = scheduler.make_stats()
    assert stats.num_preemptions == 1
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (24, 0)


def test_events_of_a_preempted_request() -> None:
    scheduler = make_scheduler(num_gpu_blocks=5, caching=False)
    for i, name in enumerate("ab", 10):
        scheduler.add_request(make_request(name, [i] * 8, max_tokens=5))
    events: list[EngineCoreEventType] = []
    while scheduler.has_requests():
        for output in step(scheduler)[1].outputs:
            if output.request_id == "b":
                events += [event.type for event in output.events]
    queued, scheduled, preempted = EngineCoreEventType
    assert events == [queued, scheduled, preempted, scheduled]


def test_the_whole_prompt_must_fit_before_admission() -> None:
    scheduler = make_scheduler(num_gpu_blocks=11, budget=16, caching=False)  # 40 tokens
    scheduler.add_request(make_request("a", 16))
    scheduler.add_request(make_request("b", [1] * 28))  # its first chunk would fit, the whole of it would not
    scheduler.schedule()
    assert [r.request_id for r in scheduler.running] == ["a"]
    eager = make_scheduler(num_gpu_blocks=11, budget=20, caching=False, scheduler_reserve_full_isl=False)
    eager.add_request(make_request("a", 16))
    eager.add_request(make_request("b", [1] * 28))
    assert eager.schedule().num_scheduled_tokens == {"a": 16, "b": 4}


def preempt_in_the_middle_of_a_prompt(**params: Any) -> tuple[Scheduler, SchedulerOutput]:
    """b has computed 9 of its 20 prompt tokens when it asks for more blocks than are free; its chunk would fit."""
    scheduler = make_scheduler(
        budget=9, num_gpu_blocks=7, caching=False, scheduler_reserve_full_isl=False, max_model_len=25
    )
    scheduler.add_request(make_request("a", 8, max_tokens=4))
    scheduler.add_request(make_request("b", 20, max_tokens=2, **params))
    for _ in range(2):
        step(scheduler)
    return scheduler, scheduler.schedule()


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    scheduler, out = preempt_in_the_middle_of_a_prompt()
    assert out.preempted_req_ids == ["b"]
    assert out.num_scheduled_tokens == {"a": 1}
    assert [r.request_id for r in scheduler.waiting] == ["b"]


def test_prompt_logprobs_are_not_doubled_by_a_preemption() -> None:
    scheduler, out = preempt_in_the_middle_of_a_prompt(prompt_logprobs=0)
    assert out.preempted_req_ids == ["b"]
    outputs = finish_step(scheduler, out).outputs
    while scheduler.has_requests():
        outputs += step(scheduler)[1].outputs
    of_b = [o.new_prompt_logprobs for o in outputs if o.request_id == "b"]
    assert [t.token_id for t in of_b[0] or []] == [*range(101, 120)]
    assert of_b[1:] == [None]


def test_the_watermark_does_not_hold_back_the_only_request() -> None:
    scheduler = make_scheduler(num_gpu_blocks=11, caching=False, watermark=0.2)
    scheduler.add_request(make_request("a", 36))  # 9 of 10 blocks
    scheduler.add_request(make_request("b", 4))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 36}


def test_a_request_that_can_never_fit_fails_alone() -> None:
    scheduler = make_scheduler(num_gpu_blocks=6, max_model_len=64)  # 20 tokens
    scheduler.add_request(make_request("big", 21))
    scheduler.add_request(make_request("long", 64))
    scheduler.add_request(make_request("small", 6, max_tokens=2))
    _, result = step(scheduler)
    failed = {o.request_id: o for o in result.outputs if o.finish_reason is FinishReason.ERROR}
    assert set(failed) == {"big", "long"}
    assert "21 tokens" in str(failed["big"].error) and "holds 20" in str(failed["big"].error)
    assert (
        failed["long"].error
        == "the prompt has 64 tokens; max_model_len is 64 and one position at least is needed for output"
    )
    assert run_until_done(scheduler) == {"small": [7]}


def test_a_request_that_outgrows_the_whole_pool_fails_instead_of_looping() -> None:
    scheduler = make_scheduler(num_gpu_blocks=4, max_model_len=64)  # 12 tokens
    request = make_request("a", 6, max_tokens=30)
    scheduler.add_request(request)
    tokens = run_until_done(scheduler, limit=20)
    assert request.status is RequestStatus.FINISHED_ERROR
    assert len(tokens["a"]) == 7  # 13 tokens: the 13th has no slot
    assert "raise kv_cache_memory_bytes" in str(request.error)


def test_prompt_logprobs_of_chunks_come_together_with_the_first_token() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add_request(make_request("a", 15, prompt_logprobs=1, logprobs=1))
    assert step(scheduler)[1].outputs == []
    out = scheduler.schedule()
    result = ModelRunnerOutput({"a": [7]}, {"a": logprobs_of([7])}, {"a": logprobs_of_chunk(out.scheduled[0])})
    (output,) = scheduler.update_from_output(out, result).outputs
    assert [t.token_id for t in output.new_prompt_logprobs or []] == [*range(101, 115)]
    assert [t.token_id for t in output.new_logprobs or []] == [7]


def test_every_result_is_stamped() -> None:
    scheduler = make_scheduler()
    _, empty = step(scheduler)
    scheduler.add_request(make_request("a", 5))
    _, full = step(scheduler)
    assert full.timestamp >= empty.timestamp > 0
    assert (empty.scheduler_stats.num_scheduled_tokens, full.scheduler_stats.num_scheduled_tokens) == (0, 5)
    assert 0 < full.scheduler_stats.kv_cache_usage < 1
