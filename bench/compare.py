"""Measure trivet beside its peers on this machine: cell by cell, A B A B, with the machine's limits next to it.

    python bench/compare.py --peer all --model smollm2-135m
    python bench/compare.py --peer llama-cpp=/envs/llama/bin/python --model models/smollm2-135m-instruct-q4_1.gguf

See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cells import FRESH_CELLS, Shape, all_cells
from engines import EngineError, EngineSpec, own_engine, parse_peer, running
from fresh import FreshOptions, measure_commands, measure_memory, measure_start
from limits import LimitsError, describe, measure_limits
from measure import cell_result, measure_cell, refuse_noise
from noise import NUM_CPUS, load_average
from peer_cache import MODELS, PEERS, default_cache
from tables import print_cell, print_heading, print_memory, print_start


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
    add_engine_flags(parser)
    names = [*FRESH_CELLS, *(cell.name for cell in all_cells(Shape()))]
    parser.add_argument("--cells", default=",".join(names), help="default: all, %(default)s")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of every engine and cell (default: 3)")
    parser.add_argument("--context", type=int, default=4096, help="start, memory: tokens of context (default: 4096)")
    parser.add_argument(
        "--fill", type=int, help="memory: prompt before the peak is read (default: the context less 64)"
    )
    parser.add_argument("--prefix-requests", type=positive, default=16, help="default: %(default)s")
    parser.add_argument("--prefix-tokens", type=positive, default=1000, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="default: bench-DATE.json")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.cells.split(",")) - set(names)):
        parser.error(f"unknown cell {unknown[0]!r}; the cells are {', '.join(names)}")
    args.fill = args.context - 64 if args.fill is None else args.fill
    if not 1 <= args.fill < args.context:
        parser.error(f"--fill is {args.fill}; expected from 1 to less than --context {args.context}")
    return args


def positive(text: str) -> int:
    """A flag's value, 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """What is measured: --model, --peer, --peer-model, --threads, --allow-noise."""
    parser.add_argument(
        "--model", action="append", required=True, metavar="MODEL",
        help=f"GGUF file, or one of {', '.join(MODELS)} made by setup_peers.py; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME[=PYTHON]",
        help=f"{', '.join(PEERS)}, or all; without =PYTHON as made by setup_peers.py; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--peer-model", action="append", default=[], metavar="NAME:MODEL=PATH",
        help="what a peer loads instead of the GGUF file with the stem MODEL (default: setup_peers.py's export)",
    )  # fmt: skip
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--allow-noise", action="store_true", help="run on a busy machine, and mark what it spoils")


def find_models(models: Sequence[str]) -> list[Path]:
    """The GGUF files of --model. EngineError names what is missing."""
    paths: list[Path] = []
    for model in models:
        paths += default_cache().gguf(model) if model in MODELS else [Path(model)]
    for path in paths:
        if not path.is_file():
            raise EngineError(f"--model {path}: no such file; `python bench/setup_peers.py` makes the models it knows")
    return paths


def find_engines(peers: Sequence[str]) -> list[EngineSpec]:
    """trivet, then the engines of --peer. EngineError names what is missing."""
    names = [name for peer in peers for name in (PEERS if peer == "all" else (peer,))]
    specs = [own_engine(), *map(parse_peer, names)]
    for spec in specs:
        spec.check()
    return specs


def find_loads(
    specs: Sequence[EngineSpec], gguf: Path, chosen: dict[tuple[str, str], Path]
) -> tuple[dict[str, Path], dict[str, str]]:
    """What each engine loads for a GGUF file, by name; and why the others are not measured."""
    found, missing = {}, {}
    for spec in specs:
        path = chosen.get((spec.name, gguf.stem))
        if path is None:
            path = gguf if spec.reads_gguf else default_cache().peer_model(spec.name, gguf.stem)
        if path is None:
            missing[spec.name] = "no export of this model; bench/setup_peers.py makes it"
        else:
            found[spec.name] = path
    return found, missing


def parse_peer_model(text: str) -> tuple[tuple[str, str], Path]:
    """(peer, stem of the GGUF file) and what the peer loads in its place."""
    key, equals, path = text.partition("=")
    name, colon, model = key.partition(":")
    if not (equals and colon and Path(path).exists()):
        raise EngineError(f"--peer-model {text!r}: expected NAME:MODEL=PATH with an existing path")
    return (name, model), Path(path)


def new_report(args: argparse.Namespace, noise: float, limits: dict[str, Any]) -> dict[str, Any]:
    """What every result file begins with."""
    return {
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu_name(), "num_cpus": NUM_CPUS, "platform": platform.platform()},
        "noise_before": noise,
        "load_average_before": load_average(),
        "limits": limits,
        "config": {name: str(value) for name, value in vars(args).items()},
        "models": [],
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


# --- measuring --------------------------------------------------------------------------------------------------------
def _compare(args: argparse.Namespace) -> int:
    specs = find_engines(args.peer)
    chosen = dict(parse_peer_model(text) for text in args.peer_model)
    paths = find_models(args.model)
    noise = refuse_noise(allowed=args.allow_noise)
    limits = measure_limits(args.threads)
    print("\n".join(describe(limits)), file=sys.stderr)
    report = new_report(args, noise, limits)
    if "start" in args.cells.split(","):
        report["commands"] = measure_commands(args.rounds)
        for name, values in report["commands"].items():
            print(f"{name:<20}{1e3 * values['median']:.0f} ms", flush=True)
    comparison = _Comparison(args, report)
    for path in paths:
        started = time.monotonic()
        comparison.measure(specs, path, chosen)
        print(f"{path.name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(f"written to {comparison.output}", file=sys.stderr)
    return 0


class _Comparison:
    """Measures one model after the other, and writes the report after every cell: a run that is stopped keeps them."""

    def __init__(self, args: argparse.Namespace, report: dict[str, Any]) -> None:
        self.output: Path = args.output or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}.json")
        self._args, self._report = args, report
        self._wanted = args.cells.split(",")
        shape = Shape(prefix=args.prefix_tokens, prefix_requests=args.prefix_requests)
        self._cells = [cell for cell in all_cells(shape) if cell.name in self._wanted]

    def measure(self, specs: Sequence[EngineSpec], gguf: Path, chosen: dict[tuple[str, str], Path]) -> None:
        """Every wanted cell of one model."""
        paths, missing = find_loads(specs, gguf, chosen)
        present = [spec for spec in specs if spec.name in paths]
        result: dict[str, Any] = {"model": gguf.name, "bytes": gguf.stat().st_size, "engines": {}, "cells": {}}
        result["not_measured"] = missing
        self._report["models"].append(result)
        print_heading(result["model"], [spec.name for spec in present])
        for name, reason in missing.items():
            print(f"{'':<14}  {name}: {reason}", flush=True)
        args = self._args
        options = FreshOptions(args.rounds, args.threads, args.context, args.fill)
        if "start" in self._wanted:
            result["cells"]["start"] = measure_start(present, paths, options)
            print_start(result["cells"]["start"])
            self._save()
        if "memory" in self._wanted:
            result["cells"]["memory"] = measure_memory(present, paths, options)
            print_memory(result["cells"]["memory"], result["bytes"])
            self._save()
        if self._cells:
            self._measure_cells(result, present, paths)

    def _measure_cells(self, result: dict[str, Any], specs: Sequence[EngineSpec], paths: dict[str, Path]) -> None:
        """The cells of engines that keep running."""
        args = self._args
        limits = limits_of(self._report["limits"], args.threads)
        context = max(cell.context() for cell in self._cells)
        with running(specs, paths, threads=args.threads, context=context) as (engines, loaded):
            result["engines"] = loaded
            for cell in self._cells:
                runs = measure_cell(cell, engines, args.rounds, repeats_noisy=not args.allow_noise)
                result["cells"][cell.name] = cell_result(cell, runs, loaded["trivet"]["cost"], limits)
                print_cell(cell.name, result["cells"][cell.name])
                self._save()

    def _save(self) -> None:
        self._report["load_average_after"] = load_average()
        self.output.write_text(json.dumps(self._report, indent=1) + "\n")


def limits_of(limits: dict[str, Any], threads: int) -> dict[str, Any]:
    """The limits of as many threads, or of all cores when there are more threads than that."""
    found: dict[str, Any] = limits[str(threads) if str(threads) in limits else max(limits, key=int)]
    return found


if __name__ == "__main__":
    sys.exit(main())
