"""What the scheduler takes from the prefix cache, one rule at a time."""

from __future__ import annotations

import pytest
from trivet.runtime.scheduler.scheduler import Scheduler

from .driver import make_request, make_scheduler, run_until_done, step


def test_a_full_hit_still_computes_the_last_block() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 16, max_tokens=1))
    run_until_done(scheduler)
    again = make_request("b", 16, max_tokens=1)
    scheduler.add_request(again)
    out, result = step(scheduler)
    assert out.num_scheduled_tokens == {"b": 4}  # 15 tokens could be taken, 12 are whole blocks
    assert out.scheduled[0].num_computed_tokens == 12
    assert result.outputs[0].num_cached_tokens == again.num_cached_tokens == 12
    stats = result.scheduler_stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (32, 12)


def test_requests_of_one_step_share_the_prefix_that_it_computes() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 16))
    out = scheduler.schedule()
    assert out.num_scheduled_tokens == {"a": 16, "b": 4}
    assert out.scheduled[0].block_ids[:3] == out.scheduled[1].block_ids[:3]


@pytest.mark.parametrize("case", ["salt", "prompt_logprobs", "off"])
def test_no_hit(case: str) -> None:
    scheduler = make_scheduler(caching=case != "off")
    scheduler.add_request(make_request("a", 16, max_tokens=1, cache_salt="tenant 1"))
    run_until_done(scheduler)
    prompt_logprobs = 1 if case == "prompt_logprobs" else None
    salt = "tenant 2" if case == "salt" else "tenant 1"
    scheduler.add_request(make_request("b", 16, cache_salt=salt, prompt_logprobs=prompt_logprobs))
    assert scheduler.schedule().num_scheduled_tokens == {"b": 16}


def test_reset_prefix_cache_waits_for_the_requests() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 16, max_tokens=2))
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    run_until_done(scheduler)
    assert scheduler.reset_prefix_cache()
    scheduler.add_request(make_request("b", 16))
    assert scheduler.schedule().num_scheduled_tokens == {"b": 16}


# --- a prefix that others are computing ---------------------------------------------------------------------------
def computed_tokens(scheduler: Scheduler) -> list[dict[str, int]]:
    """What every step computes, until all prompts are through."""
    steps = []
    while any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.requests.values()):
        out, _ = step(scheduler)
        steps.append(out.num_scheduled_tokens)
        scheduler.kv_cache_manager.check_integrity()
    return steps


def test_a_running_request_takes_up_blocks_that_another_computes() -> None:
    """Behind a limit per request, the second continues where the first stops, and the first skips what that brought."""
    scheduler = make_scheduler(budget=16, long_prefill_token_threshold=8)
    prefix = list(range(100, 132))
    for i in range(2):
        scheduler.add_request(make_request(f"r{i}", [*prefix, i]))
    assert computed_tokens(scheduler) == [{"r0": 8, "r1": 8}, {"r0": 8, "r1": 8}, {"r0": 1, "r1": 1}]


def test_a_salt_keeps_a_running_prefix_apart() -> None:
    scheduler = make_scheduler(budget=16, long_prefill_token_threshold=8)
    prefix = list(range(100, 132))
    for i in range(2):
        scheduler.add_request(make_request(f"r{i}", [*prefix, i], cache_salt=f"tenant {i}"))
    assert sum(sum(counts.values()) for counts in computed_tokens(scheduler)) == 66


def test_prompt_logprobs_take_up_nothing() -> None:
    scheduler = make_scheduler(budget=16, long_prefill_token_threshold=8)
    prefix = list(range(100, 132))
    scheduler.add_request(make_request("r0", [*prefix, 0], prompt_logprobs=0))
    scheduler.add_request(make_request("r1", [*prefix, 1]))
    assert sum(counts.get("r0", 0) for counts in computed_tokens(scheduler)) == 33


# --- a prefix that ends within a block ----------------------------------------------------------------------------
def test_the_beginning_of_a_block_is_copied() -> None:
    scheduler = make_scheduler(copy_block_heads=True)
    scheduler.add_request(make_request("a", [*range(100, 107), 1, 1], max_tokens=1))
    run_until_done(scheduler)
    scheduler.add_request(make_request("b", [*range(100, 107), 2, 2]))
    out, result = step(scheduler)
    assert out.num_scheduled_tokens == {"b": 2} and result.outputs[0].num_cached_tokens == 7
    (source, target) = out.block_copies[0]
    assert len(out.block_copies) == 1 and source != target == out.scheduled[0].block_ids[1]
    assert step(scheduler)[0].block_copies == []


def test_a_request_waits_a_step_for_half_a_block() -> None:
    """And those behind it wait with it; for less it computes the tokens itself."""
    scheduler = make_scheduler(copy_block_heads=True)
    for name, shared in (("a", 6), ("b", 6), ("c", 6), ("d", 5)):
        scheduler.add_request(make_request(name, [*range(100, 100 + shared), ord(name), 1]))
    steps = [step(scheduler)[0].num_scheduled_tokens for _ in range(2)]
    assert steps == [{"a": 8}, {"a": 1, "b": 2, "c": 2, "d": 2}]
    scheduler = make_scheduler(copy_block_heads=True)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, [*range(100, 105), ord(name), 1]))
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 7, "b": 3}


def test_no_block_is_copied_without_a_prefix_cache() -> None:
    scheduler = make_scheduler(copy_block_heads=True, caching=False)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 7))
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 7, "b": 7}
