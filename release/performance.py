"""`release performance`: the gate "competitor". bench/compare.py measures the op library of the archive beside peers.

The library is the archive's own; the Python around it is the checkout's, which must be the archive's commit. A figure
that was measured on a busy machine, or without a peer, is none; nor is a report that leaves out what a claim of speed
is about: prompts, answers and many requests at once, in several rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .archive import check_checksum, extract
from .errors import GateError
from .evidence import GateResult
from .manifest import MANIFEST_NAME
from .process import started
from .source import ROOT, Source, read_source
from .tiers import LIBRARY

GATE = "competitor"
CLAIMED = ("prefill", "decode", "concurrent")  # kinds of cells that every model of a report must have
MIN_ROUNDS = 3
_BENCH_SECONDS = 4 * 3600.0


def measure(archive: Path, evidence: Path, arguments: Sequence[str]) -> GateResult:
    """Run bench/compare.py with `arguments` on the library of `archive`; leave the verdict in `evidence`."""
    digest = check_checksum(archive)
    report_file = evidence.absolute() / "bench.json"
    evidence.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trivet-performance-") as folder:
        tree = extract(archive, Path(folder))
        manifest = json.loads((tree / MANIFEST_NAME).read_text(encoding="utf-8"))
        if found := source_problems(manifest, read_source()):
            raise GateError("; ".join(found))
        command = [sys.executable, str(ROOT / "bench" / "compare.py"), *arguments, "--output", str(report_file)]
        environment = os.environ | {"TRIVET_CPU_LIBRARY": str(tree / LIBRARY), "ORT_DISABLE_TELEMETRY": "1"}
        ended = _bench(command, environment)
    problems, details = [ended] if ended else [], {}
    if not ended:
        report = json.loads(report_file.read_text(encoding="utf-8"))
        problems = report_problems(report)
        details = {"machine": report["machine"], "date": report["date"], "figures": figures(report)}
    result = GateResult(
        GATE,
        "failed" if problems else "passed",
        f"release performance {archive.name}",
        "; ".join(problems),
        archive_sha256=digest,
        details=details,
    )
    (evidence / f"{GATE}.json").write_bytes(result.report())
    return result


def _bench(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run it; why it did not end well, or ""."""
    try:
        with started(command, env=environment) as process:
            status = process.wait(timeout=_BENCH_SECONDS)
    except subprocess.TimeoutExpired:
        return f"bench/compare.py did not end within {_BENCH_SECONDS / 3600:.0f} hours"
    return f"bench/compare.py ended with status {status}" if status else ""


def source_problems(manifest: Mapping[str, Any], source: Source) -> list[str]:
    """Why a measurement with this checkout says nothing about that archive."""
    commit = manifest["source"]["commit"]
    if source.commit != commit:
        return [f"this checkout is {source.commit}, the archive was built from {commit}"]
    return [] if source.clean_tree else ["this checkout was changed since its commit"]


def report_problems(report: Mapping[str, Any]) -> list[str]:
    """Why the report of bench/compare.py is no comparison: no peer, a failed engine, a busy machine, too little."""
    out = [] if report["models"] else ["the report holds no model"]
    if (rounds := int(report["config"]["rounds"])) < MIN_ROUNDS:
        out.append(f"every figure is of {rounds} rounds; {MIN_ROUNDS} are needed")
    for model in report["models"]:
        measured = {name.partition("-")[0] for name in model["cells"]}
        out += [f"{model['model']}: no {kind} cell was measured" for kind in CLAIMED if kind not in measured]
    for model, name, cell in _cells(report):
        where = f"{model} {name}"
        if not cell["ratios"]:
            out.append(f"{where}: trivet was measured beside no peer")
        for engine, summary in cell["engines"].items():
            if engine == "trivet" and "unsupported" in summary:
                out.append(f"{where}: trivet: {summary['unsupported']}")
            if summary.get("noisy"):
                out.append(f"{where}: the machine was busy while {engine} ran")
    return out


def figures(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Model -> cell -> medians of trivet's tokens per second and of its ratio to each peer."""
    out: dict[str, dict[str, Any]] = {}
    for model, name, cell in _cells(report):
        own = cell["engines"]["trivet"]
        if "tokens_per_second" in own:
            ratios = {peer: spread["median"] for peer, spread in cell["ratios"].items()}
            entry = {"tokens_per_second": own["tokens_per_second"]["median"], "ratios": ratios}
            out.setdefault(model, {})[name] = entry
    return out


def _cells(report: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    return [
        (model["model"], name, cell)
        for model in report["models"]
        for name, cell in model["cells"].items()
        if "ratios" in cell
    ]
