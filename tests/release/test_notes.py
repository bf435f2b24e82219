"""Figures of release notes: from the signed manifest, throughputs from the report that it refers to, or not at all."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from made_up_bundle import ARTIFACT, EPOCH, ROOT, SOURCE
from processes import runs, until

from release import performance, provenance
from release.archive import sha256_file
from release.errors import GateError
from release.evidence import GATES, GateResult, judge
from release.manifest import check_manifest
from release.matrix import Matrix
from release.notes import render, typed_figures
from release.performance import figures, report_problems, source_problems

Keys = dict[str, Path]


def spread(value: float) -> dict[str, float]:
    return {"min": value, "median": value, "max": value}


def bench_report(**changes: Any) -> dict[str, Any]:
    """What bench/compare.py writes, as far as it is read."""
    engines: dict[str, Any] = {
        "trivet": {"tokens_per_second": spread(120.0), "noisy": False},
        "llama-cpp": {"tokens_per_second": spread(100.0), "noisy": False},
    }
    cell = {"engines": engines, "ratios": {"llama-cpp": spread(1.2)}}
    cells = {name: copy.deepcopy(cell) for name in ("prefill-512", "decode-128", "concurrent-4")}
    cells["decode-128"] |= changes
    cells["memory"] = {"engines": {"trivet": {"peak_bytes": 1}}}
    model = {"model": "tiny.gguf", "engines": {}, "cells": cells}
    return {"date": "2026-01-01", "machine": {"cpu": "some"}, "config": {"rounds": "3"}, "models": [model]}


def competitor(report: Mapping[str, Any], digest: str) -> GateResult:
    return GateResult(
        "competitor", "passed", "release performance", archive_sha256=digest, details={"figures": figures(report)}
    )


@pytest.fixture
def measured(archive: Path, keys: Keys, matrix: Matrix, tmp_path: Path) -> Path:
    """The folder with the report of a comparison that the archive's manifest refers to."""
    manifest = provenance.manifest_of(provenance.read_envelope(archive, None))
    result = competitor(bench_report(), sha256_file(archive))
    manifest["evidence"]["performance_verified"] = judge(
        "performance_verified", GATES["performance_verified"], [result]
    )
    check_manifest(manifest, matrix)
    provenance.write_envelope(provenance.statement(manifest, archive, epoch=EPOCH), archive, keys["ours"])
    folder = tmp_path / "evidence"
    folder.mkdir()
    (folder / "competitor.json").write_bytes(result.report())
    return folder


def written(template: str, archive: Path, keys: Keys, evidence: Path | None = None) -> str:
    return render(template, archive.parent, SOURCE.version, keys["ours.pub"], evidence)


def test_figures_come_from_the_manifest(archive: Path, keys: Keys) -> None:
    manifest = provenance.manifest_of(provenance.read_envelope(archive, keys["ours.pub"]))
    text = written(f"{{{{{ARTIFACT} archive}}}}: {{{{ {ARTIFACT} size }}}}, {{{{{ARTIFACT} libc}}}}", archive, keys)
    size = f"{manifest['archive']['size'] / 1e6:.1f} MB"
    assert text == f"{archive.name}: {size}, glibc {manifest['target']['libc_floor']}"


def test_the_projects_own_notes_can_be_written(archive: Path, keys: Keys, matrix: Matrix) -> None:
    """They speak of every archive of a release; here all their figures are those of one."""
    template = (ROOT / "release" / "notes.md").read_text(encoding="utf-8")
    for entry in matrix.released():
        assert f"{{{{{entry.artifact_id} archive}}}}" in template
        template = template.replace(entry.artifact_id, ARTIFACT)
    text = written(template, archive, keys)
    assert archive.name in text and "{{" not in text


@pytest.mark.parametrize(
    "claim", ["1.3x faster", "43.5 MB", "120 tokens/s", "120 tok/s", "30 %", "glibc 2.31", "starts in 80 ms", "2 times"]
)
def test_a_typed_figure_is_refused(claim: str, archive: Path, keys: Keys) -> None:
    with pytest.raises(GateError, match=r"line 2: .* is typed by hand"):
        written(f"New:\n- {claim} than before\n", archive, keys)


def test_versions_and_dates_are_no_claims() -> None:
    assert typed_figures("trivet 1.2.3 of 2026-01-01, issue 42, Q4_K, CPython 3.11, 4 tiers, x86_64\n") == []


def test_unknown_figures_are_refused(archive: Path, keys: Keys) -> None:
    with pytest.raises(GateError, match="unknown figure; known are archive"):
        written(f"{{{{{ARTIFACT} beauty}}}}", archive, keys)
    with pytest.raises(GateError, match="cannot be quoted: it is blocked"):
        written("{{windows-x86_64-cpu size}}", archive, keys)


def test_nothing_is_quoted_from_an_unsigned_archive(archive: Path, keys: Keys) -> None:
    with pytest.raises(GateError, match="not signed by the key"):
        render(f"{{{{{ARTIFACT} size}}}}", archive.parent, SOURCE.version, keys["theirs.pub"], None)
    found = provenance.manifest_of(provenance.read_envelope(archive, None)) | {"archive": None}
    provenance.write_envelope(provenance.statement(found, archive, epoch=EPOCH), archive, keys["ours"])
    with pytest.raises(GateError, match="not valid"):
        written(f"{{{{{ARTIFACT} size}}}}", archive, keys)


def test_a_throughput_needs_its_report(archive: Path, keys: Keys, measured: Path) -> None:
    template = f"{{{{{ARTIFACT} speed tiny.gguf decode-128}}}}, {{{{{ARTIFACT} ratio tiny.gguf decode-128 llama-cpp}}}}"
    assert written(template, archive, keys, measured) == "120.0 tokens/s, 1.20"
    with pytest.raises(GateError, match="needs --evidence"):
        written(template, archive, keys)
    with pytest.raises(GateError, match=r"No such file or directory: .*competitor\.json"):
        written(template, archive, keys, archive.parent)
    with pytest.raises(GateError, match="nothere"):
        written(f"{{{{{ARTIFACT} speed tiny.gguf nothere}}}}", archive, keys, measured)
    report = json.loads((measured / "competitor.json").read_text())
    report["details"]["figures"]["tiny.gguf"]["decode-128"]["tokens_per_second"] = 500.0
    (measured / "competitor.json").write_text(json.dumps(report))
    with pytest.raises(GateError, match="not the report that the manifest refers to"):
        written(template, archive, keys, measured)


def test_no_throughput_without_evidence(archive: Path, keys: Keys, matrix: Matrix, tmp_path: Path) -> None:
    manifest = provenance.manifest_of(provenance.read_envelope(archive, None))
    manifest["evidence"]["performance_verified"] = judge("performance_verified", ("competitor",), [])
    check_manifest(manifest, matrix)
    provenance.write_envelope(provenance.statement(manifest, archive, epoch=EPOCH), archive, keys["ours"])
    with pytest.raises(GateError, match="performance_verified is not true: gate competitor did not run"):
        written(f"{{{{{ARTIFACT} speed tiny.gguf decode-128}}}}", archive, keys, tmp_path)


def test_a_report_that_is_no_comparison() -> None:
    assert report_problems(bench_report()) == []
    busy = bench_report()
    busy["models"][0]["cells"]["decode-128"]["engines"]["llama-cpp"]["noisy"] = True
    failed = bench_report()
    failed["models"][0]["cells"]["decode-128"]["engines"]["trivet"] = {"unsupported": "no such op"}
    for report, complaint in (
        (bench_report(ratios={}), "beside no peer"),
        (busy, "busy while llama-cpp ran"),
        (failed, "trivet: no such op"),
        (bench_report() | {"models": []}, "holds no model"),
        (bench_report() | {"config": {"rounds": "1"}}, "1 rounds; 3 are needed"),
    ):
        (found,) = report_problems(report)
        assert complaint in found


@pytest.mark.parametrize("kind", performance.CLAIMED)
def test_a_claim_needs_each_kind_of_cell(kind: str) -> None:
    """The time to start alone, for one, says nothing about speed."""
    report = bench_report()
    cells = report["models"][0]["cells"]
    report["models"][0]["cells"] = {name: cell for name, cell in cells.items() if not name.startswith(kind)}
    assert report_problems(report) == [f"tiny.gguf: no {kind} cell was measured"]


@pytest.mark.parametrize(
    ("program", "state", "reason"),
    [
        (f"open(sys.argv[-1], 'w').write({json.dumps(bench_report())!r})", "passed", ""),
        (f"open(sys.argv[-1], 'w').write({json.dumps(bench_report(ratios={}))!r})", "failed", "beside no peer"),
        ("sys.exit(3)", "failed", "bench/compare.py ended with status 3"),
        ("import time; time.sleep(60)", "failed", "did not end within"),
    ],
    ids=["compared", "alone", "broken", "endless"],
)
def test_a_comparison_that_fails_replaces_one_that_passed(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, state: str, reason: str
) -> None:
    bench, evidence = tmp_path / "checkout" / "bench", tmp_path / "evidence"
    bench.mkdir(parents=True)
    evidence.mkdir()
    (bench / "compare.py").write_text(f"import sys; {program}")
    (evidence / "competitor.json").write_bytes(competitor(bench_report(), sha256_file(archive)).report())
    monkeypatch.setattr(performance, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(performance, "read_source", lambda: SOURCE)
    monkeypatch.setattr(performance, "_BENCH_SECONDS", 2.0)
    assert performance.measure(archive, evidence, ["--model", "m"]).state == state
    report = json.loads((evidence / "competitor.json").read_text())
    assert report["state"] == state and reason in report["reason"]


def test_servers_of_peers_end_with_an_endless_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    program = f"""import pathlib, subprocess, time
pathlib.Path({str(pid_file)!r}).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
time.sleep(60)"""
    monkeypatch.setattr(performance, "_BENCH_SECONDS", 2.0)
    assert "did not end within" in performance._bench([sys.executable, "-c", program], os.environ)
    pid = int(pid_file.read_text())
    try:
        until(lambda: not runs(pid))
    finally:
        if runs(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_measurement_belongs_to_a_commit() -> None:
    manifest = {"source": {"commit": SOURCE.commit}}
    assert source_problems(manifest, SOURCE) == []
    changed = type(SOURCE)("1.2.3", 1, "a" * 40, None, False, EPOCH)
    assert source_problems(manifest, changed) == ["this checkout was changed since its commit"]
    other = type(SOURCE)("1.2.3", 1, "b" * 40, None, True, EPOCH)
    assert "the archive was built from" in source_problems(manifest, other)[0]
