"""compute-sanitizer over the op harness: what verify_cuda.py's step `sanitizer` does.

Every test of the harness runs under memcheck and under racecheck, at the small sizes of tests/kernels/sizes.py, in as
many processes as there are cores.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("racecheck", "memcheck")  # the slower one first
SHARDS = {  # processes for the tests of a file, by what they take
    "tests/kernels/test_paged_attention.py": 6,
    "tests/cuda/test_products.py": 5,
    "tests/kernels/test_sample.py": 3,
    "tests/kernels/test_e4m3_cache.py": 2,
    "tests/kernels/test_norms.py": 1,
    "tests/kernels/test_rotary.py": 1,
}
_ENVIRONMENT = {"TRIVET_KERNEL_TIERS": "cuda", "TRIVET_KERNEL_SIZES": "small"}
_OUTCOME = re.compile(r"^tests/\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", re.MULTILINE)
_REPORT = re.compile(r"^=+ (?:Error|Warning|Invalid|Program hit|Barrier|Race|Potential)\b.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Shard:
    """Tests of one file under one tool, and what became of them."""

    tool: str
    file: str
    tests: tuple[str, ...]
    status: int | None  # of the process; None: it was ended for time
    seconds: float
    text: str

    @property
    def outcomes(self) -> list[str]:
        return _OUTCOME.findall(self.text)

    @property
    def ok(self) -> bool:
        """Every test has an outcome, one passed at least (skipped tests show nothing), none failed."""
        complete = self.status == 0 and len(self.outcomes) == len(self.tests)
        return complete and "PASSED" in self.outcomes and "FAILED" not in self.outcomes

    @property
    def said(self) -> list[str]:
        """What the tool reported, or why pytest failed."""
        reports = _REPORT.findall(self.text)[:6]
        return reports if self.ok or self.status is None else [*reports, *self.text.strip().splitlines()[-6:]]


def sanitizer_step(logs: Path | None, minutes: float) -> dict[str, Any]:
    """`ok`, and `tail`: a line for each tool and file. Logs go to the folder `logs`."""
    if shutil.which("compute-sanitizer") is None:
        return {"ok": True, "skipped": "compute-sanitizer is not installed"}
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = logs or Path(scratch)
        runs = [
            pool.submit(_run, tool, file, tests, folder / f"{tool}-{Path(file).stem}-{number}.log", deadline)
            for tool in TOOLS
            for file, count in SHARDS.items()
            for number, tests in enumerate(_shares(file, count))
        ]
        shards = [run.result() for run in runs]
    return {"ok": all(shard.ok for shard in shards), "tail": _table(shards)}


def _shares(file: str, count: int) -> list[tuple[str, ...]]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", file]
    variables = os.environ | _ENVIRONMENT
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    return [tuple(tests[first::count]) for first in range(count)]


def _run(tool: str, file: str, tests: tuple[str, ...], log: Path, deadline: float) -> Shard:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "7", sys.executable, "-m", "pytest", "-v"]
    command += ["--no-header", "-p", "no:cacheprovider", "--timeout", "0", *tests]
    started, status = time.monotonic(), None
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=os.environ | _ENVIRONMENT, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(max(0.0, deadline - started))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Shard(tool, file, tests, status, time.monotonic() - started, log.read_text(errors="replace"))


def _table(shards: list[Shard]) -> list[str]:
    lines = []
    for tool in TOOLS:
        for file in SHARDS:
            own = [shard for shard in shards if (shard.tool, shard.file) == (tool, file)]
            outcomes = [outcome for shard in own for outcome in shard.outcomes]
            total, seconds = sum(len(shard.tests) for shard in own), sum(shard.seconds for shard in own)
            skipped = f", {outcomes.count('SKIPPED')} skipped" if "SKIPPED" in outcomes else ""
            late = sum(shard.status is None for shard in own)
            summaries = sorted({said for shard in own for said in _SUMMARY.findall(shard.text)})
            lines.append(
                f"{tool} {file}: {'ok' if all(shard.ok for shard in own) else 'FAILED'}, "
                f"{outcomes.count('PASSED')} of {total} tests passed{skipped}, {'; '.join(summaries) or 'no summary'}, "
                f"{seconds:.0f} s of processes" + (f", {late} of {len(own)} ended for time" if late else "")
            )
            lines += [f"  {line}" for shard in own for line in shard.said]
    return lines
