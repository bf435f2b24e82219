"""Figures from records."""

from __future__ import annotations

import pytest
from trivet.app.bench.metrics import (
    RequestRecord,
    describe_metrics,
    describe_totals,
    percentile,
    percentile_name,
    request_goodput,
)


def record(**changes: object) -> RequestRecord:
    values = {"prompt_tokens": 10, "ttft": 0.1, "latency": 0.5, "completion_tokens": 5, "itl": [0.1] * 4}
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_percentiles_interpolate_between_neighbours() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0) == 1.0
    assert percentile(values, 50) == 2.5
    assert percentile(values, 90) == pytest.approx(3.7)
    assert percentile(values, 100) == 4.0
    assert percentile([], 50) == 0.0


@pytest.mark.parametrize(("percent", "name"), [(99.0, "p99"), (99.9, "p99.9"), (5.0, "p5")])
def test_percentile_names(percent: float, name: str) -> None:
    assert percentile_name(percent) == name


def test_metrics_have_the_keys_of_vllm_bench_in_milliseconds() -> None:
    described = describe_metrics([record(), record(ttft=0.3, latency=0.7)], ["ttft", "tpot"], [99])
    assert set(described) == {
        f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot")
    }
    assert described["mean_ttft_ms"] == pytest.approx(200)
    assert described["std_ttft_ms"] == pytest.approx(100)
    assert described["mean_tpot_ms"] == pytest.approx(100)  # (latency - ttft) / 4


def test_a_single_token_has_no_time_per_output_token() -> None:
    one = record(completion_tokens=1, itl=[])
    assert one.tpot is None
    assert not [key for key in describe_metrics([one], ["tpot", "itl"], [50]) if "ms" in key]


def test_failed_requests_count_as_failed_and_in_nothing_else() -> None:
    totals = describe_totals([record(), record(error="gone", completion_tokens=99)], 2.0)
    assert (totals["completed"], totals["failed"]) == (1, 1)
    assert (totals["total_input_tokens"], totals["total_output_tokens"]) == (10, 5)
    assert totals["output_throughput"] == 2.5
    assert totals["total_token_throughput"] == 7.5


def test_concurrency_is_the_most_requests_that_overlap() -> None:
    records = [record(start=0.0), record(start=0.4), record(start=0.6)]  # each lasts 0.5
    assert describe_totals(records, 1.0)["max_concurrent_requests"] == 2


def test_the_best_second_is_that_with_most_arrivals() -> None:
    """Seconds count from the first request: 0.1 to 0.9, then 1.2 to 1.6 twice."""
    records = [record(itl=[0.2] * 4), record(start=1.1), record(start=1.1)]
    assert describe_totals(records, 1.0)["max_output_tokens_per_s"] == 10
    assert describe_totals([record(itl=[])], 1.0)["max_output_tokens_per_s"] is None


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    records = [record(), record(ttft=0.3), record(latency=3.0)]
    assert request_goodput(records, 2.0, {"ttft": 200, "e2el": 1000}) == 0.5
