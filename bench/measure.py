"""Running one cell on every engine in turn, and what follows from the figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cells import Cell
from engines import EngineError, EngineProcess, Unsupported
from noise import Meter, idle_noise, load_average

MAX_NOISE = 0.06  # share of the machine that others may use during a run


@dataclass(slots=True)
class Runs:
    """The runs of one engine in one cell."""

    rates: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    unsupported: str | None = None

    def summary(self) -> dict[str, Any]:
        if self.unsupported is not None:
            return {"unsupported": self.unsupported}
        result: dict[str, Any] = {
            "tokens_per_second": spread(self.rates),
            "noise": self.noises,
            "noisy": max(self.noises) > MAX_NOISE,
        }
        for name, percent in (("ttft", 50), ("ttft", 99), ("itl", 50), ("itl", 99)):
            values = [percentile(answer[name], percent) for answer in self.answers if answer.get(name)]
            if values:
                result[f"p{percent}_{name}_seconds"] = spread(values)
        for name in ("prompt_tokens_computed", "flash_attention"):
            if name in self.answers[-1]:
                result[name] = self.answers[-1][name]
        return result


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round((len(ordered) - 1) * percent / 100))]


def refuse_noise(*, allowed: bool) -> float:
    """Share of the machine that others use. EngineError when it is too much and not allowed."""
    noise = idle_noise(2.0)
    if noise > MAX_NOISE and not allowed:
        raise EngineError(
            f"others use {noise:.0%} of the machine (load average {load_average():.2f}), more than {MAX_NOISE:.0%}: "
            "wait until it is idle, or give --allow-noise to have the runs marked"
        )
    return noise


def measure_cell(cell: Cell, engines: Sequence[EngineProcess], rounds: int, *, repeats_noisy: bool) -> dict[str, Runs]:
    """One run each to warm up, then `rounds` times every engine in turn; a noisy run is repeated once.

    A peer that fails is left out with its reason; EngineError when trivet fails.
    """
    runs = {engine.name: Runs() for engine in engines}
    for index in range(rounds + 1):
        for engine in engines:
            mine, warming_up = runs[engine.name], index == 0
            if mine.unsupported is not None:
                continue
            if warming_up and cell.name == "prefix-cold":
                continue  # the longest cell; the engines are warm from the others
            try:
                answer, noise = _run(cell, engine, index)
                if repeats_noisy and not warming_up and noise > MAX_NOISE:
                    answer, noise = min((answer, noise), _run(cell, engine, index + 1000), key=lambda run: run[1])
            except Unsupported as reason:
                mine.unsupported = str(reason)
                continue
            except EngineError as error:
                if engine.name == "trivet":
                    raise
                mine.unsupported = str(error)
                continue
            if not warming_up:
                mine.rates.append(cell.rate(answer))
                mine.noises.append(noise)
                mine.answers.append(answer)
    return runs


def _run(cell: Cell, engine: EngineProcess, seed: int) -> tuple[dict[str, Any], float]:
    time.sleep(0.05)  # threads of the other engine that still spin go to sleep
    with Meter(engine.pid) as meter:
        answer = engine.ask(cell.operation, **cell.request(seed))
    return answer, meter.noise


def cell_result(cell: Cell, runs: dict[str, Runs], cost: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """Figures of all engines; ratios of trivet to each peer, from the runs of the same round; the machine's limit."""
    engines = {name: mine.summary() for name, mine in runs.items()}
    result: dict[str, Any] = {"arguments": cell.arguments, "engines": engines}
    own = runs["trivet"]
    result["ratios"] = {
        name: spread([a / b for a, b in zip(own.rates, theirs.rates, strict=True)])
        for name, theirs in runs.items()
        if name != "trivet" and theirs.unsupported is None and own.unsupported is None
    }
    result["limit"] = None
    if own.unsupported is None and (limit := cell.limit(cost, limits)) is not None:
        name, most = limit
        share = statistics.median(own.rates) / most
        result["limit"] = {"name": name, "tokens_per_second": most, "share": share}
    return result
