"""The thread pool and the weight chain, compiled on their own: check_threads.cc, also under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (
    "tests/kernels/check_threads.cc",
    "backends/common/thread_pool.cc",
    "backends/cpu/ops/weight_chain.cc",
)


@pytest.mark.parametrize("flags", [(), ("-fsanitize=thread",)], ids=["plain", "thread sanitizer"])
def test_threads(flags: tuple[str, ...], tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "a C++ compiler is needed, as for the library itself"
    program = tmp_path / "check_threads"
    command: list[str | Path] = [compiler, "-std=c++20", "-O1", *flags, "-o", program, "-pthread"]
    # A run under AddressSanitizer preloads its runtime, which no program with ThreadSanitizer survives.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([*command, *(ROOT / source for source in SOURCES)], env=environment, check=True)
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
