"""Build limits.c for this machine and run it on one and on all cores. `python bench/limits.py` prints the result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("limits.c")
_RATES = ("read_gbps", "int8_gops", "bf16_gflops", "fp32_gflops", "amx_int8_gops", "amx_bf16_gflops")


class LimitsError(Exception):
    """No compiler, or the program failed."""


def measure_limits(
    threads: int | None = None, *, counts: Sequence[int] = (), repetitions: int = 7, mebibytes: int = 1024
) -> dict[str, Any]:
    """{"1": …, "N": …}: the rates of limits.c on one core, on `threads`, on `counts` and on all. Raises LimitsError."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise LimitsError("limits.c needs a C compiler: install gcc, or name one in CC")
    with tempfile.TemporaryDirectory(prefix="trivet-limits-") as folder:
        program = str(Path(folder) / "limits")
        _run([compiler, "-O3", "-march=native", "-pthread", str(_SOURCE), "-o", program])
        num_cpus = len(os.sched_getaffinity(0))
        wanted = sorted({min(count, num_cpus) for count in (1, threads or num_cpus, num_cpus, *counts)})
        runs = {str(n): json.loads(_run([program, str(n), str(repetitions), str(mebibytes)])) for n in wanted}
    return runs


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LimitsError(f"{Path(command[0]).name} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def describe(limits: dict[str, Any]) -> list[str]:
    """One line for each number of threads."""
    lines = []
    for threads, run in limits.items():
        parts = [f"{name} {run[name]['median']:.0f}" for name in _RATES if run[name] is not None]
        parts += [f"{name} -" for name in _RATES if run[name] is None]
        lines.append(f"limits, {threads} thread(s): " + ", ".join(parts))
    return lines


if __name__ == "__main__":
    found = measure_limits()
    print("\n".join(describe(found)), file=sys.stderr)
    print(json.dumps(found, indent=2))
