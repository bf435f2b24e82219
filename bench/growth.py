"""How time grows: decode against threads, prefill against the length of the prompt. JSON, and a plot of it.

    python bench/growth.py --peer all --model smollm2-135m --output growth.json
    python bench/growth.py --plot growth.json growth.svg

The plot needs matplotlib (`pip install -e '.[bench]'`). See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cells import Cell
from compare import (
    add_engine_flags,
    find_engines,
    find_loads,
    find_models,
    limits_of,
    new_report,
    parse_peer_model,
    positive,
)
from engines import EngineError, EngineSpec, running
from limits import LimitsError, measure_limits
from measure import cell_result, measure_cell, refuse_noise

_CONTEXT, _TOKENS = 128, 64  # of the decode runs
_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8191)  # the last one leaves room for its answer in 8192


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["--plot"]:
        return _plot_command(arguments[1:])
    args = _parse(arguments)
    try:
        return _grow(args)
    except (EngineError, LimitsError) as error:
        print(f"growth: {error}", file=sys.stderr)
        return 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_flags(parser)
    counts = thread_counts(len(os.sched_getaffinity(0)))
    parser.add_argument("--thread-counts", type=_numbers, default=counts, help=f"default: {_list(counts)}")
    parser.add_argument("--lengths", type=_numbers, default=_LENGTHS, help=f"default: {_list(_LENGTHS)}")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of every engine and point (default: 3)")
    parser.add_argument("--output", type=Path, help="default: growth-DATE.json")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(part) for part in text.split(",")}))


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def thread_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most`."""
    counts = {most}
    count = 1
    while count < most:
        counts.add(count)
        count *= 2
    return tuple(sorted(counts))


def _grow(args: argparse.Namespace) -> int:
    specs = find_engines(args.peer)
    chosen = dict(parse_peer_model(text) for text in args.peer_model)
    paths = find_models(args.model)
    noise = refuse_noise(allowed=args.allow_noise)
    limits = measure_limits(args.threads, counts=args.thread_counts)
    report = new_report(args, noise, limits)
    output = args.output or Path(f"growth-{datetime.now():%Y%m%d-%H%M%S}.json")
    for path in paths:
        print(f"\n{path.name}: tokens per second", flush=True)
        found, missing = find_loads(specs, path, chosen)
        for name, reason in missing.items():
            print(f"{name}: {reason}", flush=True)
        present = [spec for spec in specs if spec.name in found]
        result = _grow_model(present, found, limits, args)
        report["models"].append({"model": path.name, "not_measured": missing, **result})
        output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {output}", file=sys.stderr)
    return 0


def _grow_model(
    specs: Sequence[EngineSpec], paths: Mapping[str, Path], limits: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """{"decode": {threads: cell}, "prefill": {length: cell}} with the cells of compare.py, and "efficiency"."""
    decode: dict[str, Any] = {}
    cell = Cell(f"decode-{_CONTEXT}", "decode", {"context": _CONTEXT, "tokens": _TOKENS}, seeded=False)
    for threads in args.thread_counts:
        decode[str(threads)] = _measure(specs, paths, [cell], threads, limits, args)[0]
        _print(f"decode, {threads} threads", decode[str(threads)])
    prefills = [Cell(f"prefill-{length}", "prefill", {"tokens": length}) for length in args.lengths]
    measured = _measure(specs, paths, prefills, args.threads, limits, args)
    prefill = {str(length): result for length, result in zip(args.lengths, measured, strict=True)}
    for length, result in prefill.items():
        _print(f"prefill, {length} tokens", result)
    return {"decode": decode, "prefill": prefill, "efficiency": parallel_efficiency(decode)}


def _measure(
    specs: Sequence[EngineSpec],
    paths: Mapping[str, Path],
    cells: Sequence[Cell],
    threads: int,
    limits: dict[str, Any],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    context = max(cell.context() for cell in cells)
    with running(specs, paths, threads=threads, context=context) as (engines, loaded):
        cost, own = loaded["trivet"]["cost"], limits_of(limits, threads)
        return [
            cell_result(cell, measure_cell(cell, engines, args.rounds, repeats_noisy=not args.allow_noise), cost, own)
            for cell in cells
        ]


def parallel_efficiency(decode: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """{engine: {threads: share}}: of what as many single threads would do, or of the read bandwidth if that is less."""
    if not decode:
        return {}
    least = min(decode, key=int)
    most = {threads: cell["limit"]["tokens_per_second"] for threads, cell in decode.items() if cell["limit"]}
    efficiency: dict[str, dict[str, float]] = {}
    for threads, cell in decode.items():
        for engine, summary in cell["engines"].items():
            single = decode[least]["engines"][engine]
            if "unsupported" in summary or "unsupported" in single:
                continue
            ideal = single["tokens_per_second"]["median"] * int(threads) / int(least)
            bound = min(ideal, most.get(threads, ideal)) if engine == "trivet" else ideal
            efficiency.setdefault(engine, {})[threads] = summary["tokens_per_second"]["median"] / bound
    return efficiency


def _print(label: str, result: Mapping[str, Any]) -> None:
    figures = []
    for engine, summary in result["engines"].items():
        rate = "unsupported" if "unsupported" in summary else f"{summary['tokens_per_second']['median']:.1f}"
        figures.append(f"{engine} {rate}{'!' if summary.get('noisy') else ''}")
    print(f"{label:<24}{', '.join(figures)}", flush=True)


# --- the plot ---------------------------------------------------------------------------------------------------------
def _plot_command(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("growth: --plot takes a result of this program and the SVG or PNG file to write", file=sys.stderr)
        return 2
    try:
        plot(json.loads(Path(arguments[0]).read_text()), Path(arguments[1]))
    except ImportError:
        print("growth: --plot needs matplotlib: pip install -e '.[bench]'", file=sys.stderr)
        return 1
    return 0


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Two panels for each model: ms per decoded token over threads, and seconds of prefill over the prompt's length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = report["models"]
    figure, axes = pyplot.subplots(len(models), 2, figsize=(11, 3.6 * len(models)), squeeze=False, layout="constrained")
    for row, model in zip(axes, models, strict=True):
        _panel(
            row[0], decode_times(model), "threads", "ms per token", f"{model['model']}: decode at context {_CONTEXT}"
        )
        row[0].set_ylim(bottom=0)
        _panel(row[1], prefill_times(model), "tokens of the prompt", "s", f"{model['model']}: prefill")
        row[1].set_yscale("log", base=2)
        row[1].yaxis.set_major_formatter("{x:g}")
    figure.suptitle(f"{report['machine']['cpu']}, {report['date'][:10]}", fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)


def _panel(axis: Any, series: Mapping[str, Mapping[int, float]], x_label: str, y_label: str, title: str) -> None:
    for engine, points in series.items():
        axis.plot(list(points), list(points.values()), marker="o", markersize=3, label=engine)
    ticks = sorted({x for points in series.values() for x in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set(xlabel=x_label, ylabel=y_label)
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def decode_times(model: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """{engine: {threads: ms per token}}."""
    return _series(model["decode"], lambda _, rate: 1e3 / rate)


def prefill_times(model: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """{engine: {tokens: seconds}}."""
    return _series(model["prefill"], lambda tokens, rate: tokens / rate)


def _series(
    results: Mapping[str, Mapping[str, Any]], value: Callable[[int, float], float]
) -> dict[str, dict[int, float]]:
    series: dict[str, dict[int, float]] = {}
    for key, result in results.items():
        for engine, summary in result["engines"].items():
            if "unsupported" not in summary:
                series.setdefault(engine, {})[int(key)] = value(int(key), summary["tokens_per_second"]["median"])
    return series


if __name__ == "__main__":
    sys.exit(main())
