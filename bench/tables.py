"""Tables of compare.py's results: lines while it runs, and README's table from the JSON files.

python bench/tables.py bench-20261129-220000.json ...       a Markdown table of all of them
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_TITLES = {
    "llama-cpp": "llama.cpp",
    "openvino": "OpenVINO GenAI",
    "onnxruntime-genai": "onnxruntime-genai",
}
_LATENCIES = (("TTFT p50", "p50_ttft_seconds"), ("p99", "p99_ttft_seconds"), ("ITL p99", "p99_itl_seconds"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of compare.py; a later cell replaces it")
    args = parser.parse_args(argv)
    reports = [json.loads(path.read_text()) for path in args.results]
    print("\n".join(describe_runs(reports)))
    print("\n".join(markdown(merge(reports))))
    return 0


def merge(reports: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """{model file: {cell: result}} of all reports; of two results of one cell the later one stays."""
    models: dict[str, dict[str, Any]] = {}
    for report in reports:
        for model in report["models"]:
            models.setdefault(model["model"], {}).update(model["cells"])
    return models


def describe_runs(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each report: machine, date, rounds, what was measured with."""
    lines = []
    for report in reports:
        machine, limits = report["machine"], report["limits"]
        most = limits[max(limits, key=int)]
        rates = [f"{name} {most[name]['median']:.0f}" for name in most if isinstance(most[name], dict)]
        versions = sorted({engine["version"] for model in report["models"] for engine in model["engines"].values()})
        lines.append(
            f"{report['date'][:10]}, {machine['cpu']}, {report['config']['threads']} of {machine['num_cpus']} cores, "
            f"{report['config']['rounds']} rounds; limits: {', '.join(rates)}; {', '.join(versions)}"
        )
    return [*lines, ""]


# --- Markdown ---------------------------------------------------------------------------------------------------------
def markdown(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Medians of trivet and, with trivet's ratio in brackets, of each peer; then the share of the machine's limit."""
    peers = [
        name for name in _TITLES if any(name in cell["engines"] for cells in models.values() for cell in cells.values())
    ]
    titles = [_TITLES[name] for name in peers]
    lines = [f"| cell | trivet | {' | '.join([*titles, 'of the limit'])} |", "| --- |" + " --- |" * (len(peers) + 2)]
    for model, cells in models.items():
        first = True
        for name, cell in cells.items():
            for label, row in _rows(name, cell, peers):
                lines.append(f"| {f'{model}: ' if first else ''}{label} | {' | '.join(row)} |")
                first = False
    return lines


def _rows(name: str, cell: Mapping[str, Any], peers: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(label, columns from trivet's to the limit's) of the row or rows of a cell."""
    engines, own = cell["engines"], cell["engines"]["trivet"]
    if "unsupported" in own:
        return [(_label(name, cell), ["-"] * (len(peers) + 2))]
    if name == "memory":
        rows = []
        for key, label in (("peak_rss", "peak memory, MB"), ("anonymous", "of it anonymous, MB")):
            values = [_figure(engines.get(peer), key, 1e-6, own, form=".0f") for peer in peers]
            rows.append((label, [f"{own[key] / 1e6:.0f}", *values, "-"]))
        return rows
    key = "seconds" if name == "start" else "tokens_per_second"
    form = ".2f" if name == "start" else ".0f"
    columns = [f"{own[key]['median']:{form}}"]
    for peer in peers:
        summary = engines.get(peer)
        if summary is None or "unsupported" in summary:
            columns.append("-")
        else:
            columns.append(f"{summary[key]['median']:{form}} ({cell['ratios'][peer]['median']:.2f}x)")
    limit = cell.get("limit")
    return [(_label(name, cell), [*columns, f"{limit['share']:.0%} {limit['name']}" if limit else "-"])]


def _figure(summary: Mapping[str, Any] | None, key: str, scale: float, own: Mapping[str, Any], *, form: str) -> str:
    if summary is None or "unsupported" in summary:
        return "-"
    return f"{summary[key] * scale:{form}} ({own[key] / summary[key]:.2f}x)"


def _label(name: str, cell: Mapping[str, Any]) -> str:
    kind, _, number = name.partition("-")
    if kind == "prefix":
        sizes = cell["arguments"]
        state = {"cold": "cold", "warm": "cached"}[number]
        return f"{sizes['requests']} questions behind one {sizes['prefix']}-token prefix, {state}"
    return {
        "prefill": f"prefill {number}",
        "decode": f"decode at context {number}",
        "concurrent": f"{number} clients at once",
        "start": "start to first token, s",
    }[kind]


# --- lines of a run ---------------------------------------------------------------------------------------------------
def print_heading(model: str, engines: Sequence[str]) -> None:
    names = "".join(f"{name + ' tok/s':>26}" for name in engines)
    ratios = "".join(f"{'/ ' + name:>22}" for name in engines[1:])
    print(f"\n{model}\n{'cell':<14}{names}{ratios}{'of limit':>22}  (min median max; ! = noisy)", flush=True)


def print_cell(name: str, result: Mapping[str, Any]) -> None:
    figures, ratios, notes = "", "", []
    for engine, summary in result["engines"].items():
        if "unsupported" in summary:
            figures += f"{'unsupported':>26}"
            notes.append(summary["unsupported"])
        else:
            figures += f"{_triple(summary['tokens_per_second'], '.1f') + ('!' if summary['noisy'] else ' '):>26}"
            notes += _latency_notes(engine, summary)
        if engine != "trivet":
            ratio = result["ratios"].get(engine)
            ratios += f"{_triple(ratio, '.2f') if ratio else '-':>22}"
    limit = result["limit"]
    share = f"{limit['share']:.0%} of {limit['tokens_per_second']:.0f} {limit['name']}" if limit else "-"
    print(f"{name:<14}{figures}{ratios}{share:>22}", flush=True)
    for note in notes:
        print(f"{'':<14}  {note}", flush=True)


def print_start(result: Mapping[str, Any]) -> None:
    for engine, summary in result["engines"].items():
        if "unsupported" in summary:
            print(f"start         {engine}: {summary['unsupported']}", flush=True)
            continue
        ratio = result["ratios"].get(engine)
        noisy = "!" if summary["noisy"] else " "
        print(
            f"start         {engine:<20}{_triple(summary['seconds'], '.2f')}{noisy} s to the first token, of it "
            f"{summary['load_seconds']['median']:.2f} s loading"
            + (f"; ratio {_triple(ratio, '.2f')}" if ratio else ""),
            flush=True,
        )


def print_memory(result: Mapping[str, Any], file_bytes: int) -> None:
    for engine, summary in result["engines"].items():
        if "unsupported" in summary:
            print(f"memory        {engine}: {summary['unsupported']}", flush=True)
            continue
        print(
            f"memory        {engine:<20}peak {summary['peak_rss'] / 1e6:.0f} MB, anonymous "
            f"{summary['anonymous'] / 1e6:.0f} MB (file {file_bytes / 1e6:.0f}, KV {result['kv_bytes'] / 1e6:.0f})",
            flush=True,
        )


def _triple(values: Mapping[str, float], form: str) -> str:
    return " ".join(format(values[key], form) for key in ("min", "median", "max"))


def _latency_notes(name: str, summary: Mapping[str, Any]) -> list[str]:
    if "p99_ttft_seconds" not in summary:
        return []
    parts = [f"{label} {1e3 * summary[key]['median']:.0f} ms" for label, key in _LATENCIES if key in summary]
    if "prompt_tokens_computed" in summary:
        parts.append(f"prompt tokens computed {summary['prompt_tokens_computed']}")
    return [f"{name}: {', '.join(parts)}"]


if __name__ == "__main__":
    sys.exit(main())
