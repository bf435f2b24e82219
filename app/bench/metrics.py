"""What happened to each request, and what follows from it; names, formulas and JSON keys are vLLM's bench's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

METRIC_NAMES: Final = ("ttft", "tpot", "itl", "e2el")
DESCRIPTIONS: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(slots=True)
class RequestRecord:
    """One request. Times in seconds; token counts are exact where `counts_from` says so."""

    prompt_tokens: int
    start: float = 0.0  # perf_counter when it was sent
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)  # gaps between arrivals of text; empty where they are not observed
    latency: float = 0.0  # from sending to the last token
    completion_tokens: int = 0
    cached_tokens: int | None = None  # None = not reported
    counts_from: str = "engine"  # "engine", "usage" (reported by the server) or "chunks" (it reported nothing)
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.completion_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.completion_tokens - 1)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between order statistics, as numpy.percentile; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def percentile_name(percent: float) -> str:
    """99.0 -> p99, 99.9 -> p99.9."""
    return f"p{int(percent) if percent == int(percent) else percent}"


def metric_values(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Metric -> milliseconds of all requests that succeeded."""
    return {
        "ttft": [1e3 * r.ttft for r in records],
        "tpot": [1e3 * r.tpot for r in records if r.tpot is not None],
        "itl": [1e3 * gap for r in records for gap in r.itl],
        "e2el": [1e3 * r.latency for r in records],
    }


def describe_metrics(
    records: Sequence[RequestRecord], names: Sequence[str], percentiles: Sequence[float]
) -> dict[str, float]:
    """`mean_ttft_ms`, `median_…`, `std_…`, `p99_…` of every named metric that was observed."""
    result: dict[str, float] = {}
    for name, values in metric_values(records).items():
        if name not in names or not values:
            continue
        mean = sum(values) / len(values)
        result[f"mean_{name}_ms"] = mean
        result[f"median_{name}_ms"] = percentile(values, 50)
        result[f"std_{name}_ms"] = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        for percent in percentiles:
            result[f"{percentile_name(percent)}_{name}_ms"] = percentile(values, percent)
    return result


def describe_totals(records: Sequence[RequestRecord], duration: float) -> dict[str, Any]:
    """Counts and rates. Failed requests count as failed and in nothing else."""
    completed = [record for record in records if record.error is None]
    total_input = sum(record.prompt_tokens for record in completed)
    total_output = sum(record.completion_tokens for record in completed)
    cached = [record.cached_tokens for record in completed if record.cached_tokens is not None]
    return {
        "duration": duration,
        "completed": len(completed),
        "failed": len(records) - len(completed),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "total_cached_tokens": sum(cached) if cached else None,
        "token_counts_from": sorted({record.counts_from for record in completed}),
        "request_throughput": len(completed) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": _max_output_tokens(completed),
        "max_concurrent_requests": _max_concurrent(completed),
    }


def _max_output_tokens(records: Sequence[RequestRecord]) -> int | None:
    """Most arrivals of text in a second, counted from the first request on; None where they are not observed."""
    if not any(record.itl for record in records):
        return None
    begin = min(record.start for record in records)
    arrivals = (
        moment for r in records for moment in accumulate(r.itl, initial=r.start + r.ttft - begin) if r.completion_tokens
    )
    return max(Counter(int(moment) for moment in arrivals).values())


def _max_concurrent(records: Sequence[RequestRecord]) -> int:
    edges = sorted([(r.start, 1) for r in records] + [(r.start + r.latency, -1) for r in records])
    running = most = 0
    for _, step in edges:
        running += step
        most = max(most, running)
    return most


def request_goodput(records: Sequence[RequestRecord], duration: float, limits_ms: Mapping[str, float]) -> float:
    """Requests per second that kept every limit."""
    good = 0
    for record in records:
        if record.error is None:
            values = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
            good += all(1e3 * values[name] <= limit for name, limit in limits_ms.items())
    return good / duration
