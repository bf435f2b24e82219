"""Measure trivet beside its peers on this machine: cell by cell, A B A B, with the machine's limits next to it.

    python bench/compare.py --peer llama-cpp=/envs/llama/bin/python --model models/smollm2-135m-instruct-q4_1.gguf

See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cells import Cell, Shape, all_cells
from engines import EngineError, EngineProcess, EngineSpec, Unsupported, own_engine, parse_peer
from limits import LimitsError, describe, measure_limits
from noise import NUM_CPUS, Meter, idle_noise, load_average

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


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the engines too
    try:
        return _compare(args)
    except (EngineError, LimitsError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, type=Path, help="GGUF file; may be repeated")
    add_peer_flags(parser)
    names = [cell.name for cell in all_cells(Shape())]
    parser.add_argument("--cells", default=",".join(names), help="default: all, %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every engine and cell (default: 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--prefix-requests", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--prefix-tokens", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--allow-noise", action="store_true", help="run on a busy machine, and mark what it spoils")
    parser.add_argument("--output", type=Path, help="default: bench-DATE.json")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.cells.split(",")) - set(names)):
        parser.error(f"unknown cell {unknown[0]!r}; the cells are {', '.join(names)}")
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be 1 or more")
    return args


def add_peer_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="may be repeated")
    parser.add_argument(
        "--peer-model", action="append", default=[], metavar="NAME:MODEL=PATH",
        help="what a peer loads instead of the GGUF file with the stem MODEL",
    )  # fmt: skip


def _compare(args: argparse.Namespace) -> int:
    specs = [own_engine(), *map(parse_peer, args.peer)]
    for spec in specs:
        spec.check()
    peer_models = dict(parse_peer_model(text) for text in args.peer_model)
    for path in args.model:
        if not path.is_file():
            raise EngineError(f"--model {path}: no such file")
    noise = refuse_noise(allowed=args.allow_noise)
    limits = measure_limits(args.threads)
    print("\n".join(describe(limits)), file=sys.stderr)
    shape = Shape(prefix=args.prefix_tokens, prefix_requests=args.prefix_requests)
    cells = [cell for cell in all_cells(shape) if cell.name in args.cells.split(",")]
    report: dict[str, Any] = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu_name(), "num_cpus": NUM_CPUS, "platform": platform.platform()},
        "noise_before": noise,
        "load_average_before": load_average(),
        "limits": limits,
        "config": {name: str(value) for name, value in vars(args).items()},
        "models": [],
    }
    output = args.output or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}.json")
    for path in args.model:
        paths = {spec.name: peer_models.get((spec.name, path.stem), path) for spec in specs}
        report["models"].append(_measure_model(path, specs, paths, cells, limits, args))
        report["load_average_after"] = load_average()
        output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {output}", file=sys.stderr)
    return 0


def refuse_noise(*, allowed: bool) -> float:
    """Share of the machine that others use, also said on stderr. EngineError when it is too much and not allowed."""
    noise = idle_noise(2.0)
    print(f"load average {load_average():.2f}, {noise:.0%} of {NUM_CPUS} cores in use by others", file=sys.stderr)
    if noise > MAX_NOISE and not allowed:
        raise EngineError(
            f"others use {noise:.0%} of the machine, more than {MAX_NOISE:.0%}: wait until it is idle, or give "
            "--allow-noise to have the runs marked"
        )
    return noise


def parse_peer_model(text: str) -> tuple[tuple[str, str], Path]:
    """(peer, stem of the GGUF file) and what the peer loads in its place."""
    key, equals, path = text.partition("=")
    name, colon, model = key.partition(":")
    if not (equals and colon and Path(path).exists()):
        raise EngineError(f"--peer-model {text!r}: expected NAME:MODEL=PATH with an existing path")
    return (name, model), Path(path)


# --- one model --------------------------------------------------------------------------------------------------------
def _measure_model(
    path: Path,
    specs: Sequence[EngineSpec],
    paths: dict[str, Path],
    cells: Sequence[Cell],
    limits: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    started = time.monotonic()
    result: dict[str, Any] = {"model": path.name, "bytes": path.stat().st_size, "engines": {}, "cells": {}}
    context = max(cell.context() for cell in cells) + 64
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as folder:
        engines = [EngineProcess(spec, log=Path(folder) / f"{spec.name}.log") for spec in specs]
        try:
            for engine in engines:
                result["engines"][engine.name] = engine.ask(
                    "load", model=str(paths[engine.name]), threads=args.threads, context=context
                )
            settings = result["engines"]["trivet"]["settings"]
            cost = settings["cost"] | {"kv_cache_dtype": settings["kv_cache_dtype"]}
            _print_heading(path, engines)
            for cell in cells:
                runs = _measure_cell(cell, engines, args.rounds, repeats_noisy=not args.allow_noise)
                result["cells"][cell.name] = _cell_result(cell, runs, cost, limits[_limit_key(limits, args.threads)])
                _print_cell(cell, result["cells"][cell.name])
            for engine in engines:
                result["engines"][engine.name]["memory"] = engine.ask("memory")
        finally:
            for engine in engines:
                engine.close()
    print(f"{path.name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return result


def _limit_key(limits: dict[str, Any], threads: int) -> str:
    """The limits of as many threads, or of all cores when there are more threads than that."""
    return str(threads) if str(threads) in limits else max(limits, key=int)


def _measure_cell(cell: Cell, engines: Sequence[EngineProcess], rounds: int, *, repeats_noisy: bool) -> dict[str, Runs]:
    """One run each to warm up, then `rounds` times every engine in turn; a noisy run is repeated once."""
    runs = {engine.name: Runs() for engine in engines}
    for index in range(rounds + 1):
        for engine in engines:
            mine = runs[engine.name]
            if mine.unsupported is not None:
                continue
            warming_up = index == 0
            if warming_up and cell.name == "prefix-cold":
                continue  # the longest cell; the engines are warm from the others
            try:
                answer, noise = _run(cell, engine, index)
                if repeats_noisy and not warming_up and noise > MAX_NOISE:
                    answer, noise = min((answer, noise), _run(cell, engine, index + 1000), key=lambda run: run[1])
            except Unsupported as reason:
                mine.unsupported = str(reason)
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


def _cell_result(cell: Cell, runs: dict[str, Runs], cost: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """Figures of all engines; ratios of trivet to each peer, from the runs of the same round."""
    result: dict[str, Any] = {name: mine.summary() for name, mine in runs.items()}
    own = runs["trivet"]
    ratios = {}
    for name, theirs in runs.items():
        if name != "trivet" and theirs.unsupported is None and own.unsupported is None:
            ratios[name] = spread([a / b for a, b in zip(own.rates, theirs.rates, strict=True)])
    result["ratios"] = ratios
    if own.unsupported is None:
        limit = cell.share_of_limit(statistics.median(own.rates), cost, limits)
        result["share_of_limit"] = None if limit is None else {"limit": limit[0], "share": limit[1]}
    return result


# --- the table --------------------------------------------------------------------------------------------------------
def _print_heading(path: Path, engines: Sequence[EngineProcess]) -> None:
    names = "".join(f"{engine.name + ' tok/s':>26}" for engine in engines)
    ratios = "".join(f"{'/ ' + engine.name:>22}" for engine in engines[1:])
    print(f"\n{path.name}\n{'cell':<14}{names}{ratios}{'of limit':>14}  (min median max; ! = noisy)", flush=True)


def _print_cell(cell: Cell, result: dict[str, Any]) -> None:
    figures, ratios, notes = "", "", []
    for name, summary in result.items():
        if name in ("ratios", "share_of_limit"):
            continue
        if "unsupported" in summary:
            figures += f"{'unsupported':>26}"
            notes.append(summary["unsupported"])
        else:
            figures += f"{_triple(summary['tokens_per_second'], '.1f') + ('!' if summary['noisy'] else ' '):>26}"
            notes += _latency_notes(name, summary)
        if name != "trivet":
            ratio = result["ratios"].get(name)
            ratios += f"{_triple(ratio, '.2f') if ratio else '-':>22}"
    limit = result.get("share_of_limit")
    share = f"{limit['share']:.0%} {limit['limit']}" if limit else "-"
    print(f"{cell.name:<14}{figures}{ratios}{share:>14}", flush=True)
    for note in notes:
        print(f"{'':<14}  {note}", flush=True)


def _triple(values: dict[str, float], form: str) -> str:
    return " ".join(format(values[key], form) for key in ("min", "median", "max"))


def _latency_notes(name: str, summary: dict[str, Any]) -> list[str]:
    if "p99_ttft_seconds" not in summary:
        return []
    parts = [
        f"{label} {1e3 * summary[key]['median']:.0f} ms"
        for label, key in (
            ("TTFT p50", "p50_ttft_seconds"),
            ("p99", "p99_ttft_seconds"),
            ("ITL p99", "p99_itl_seconds"),
        )
        if key in summary
    ]
    if "prompt_tokens_computed" in summary:
        parts.append(f"prompt tokens computed {summary['prompt_tokens_computed']}")
    return [f"{name}: {', '.join(parts)}"]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
