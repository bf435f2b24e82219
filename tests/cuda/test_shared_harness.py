"""The tests of tests/kernels that name no CPU tier, run on a CUDA device in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .require import needs_device

KERNELS = Path(__file__).parents[1] / "kernels"


@needs_device
@pytest.mark.parametrize("name", ["norms", "rotary", "paged_attention", "e4m3_cache", "sample"])
def test_kernel_tests_pass_on_the_device(name: str) -> None:
    environment = os.environ | {"TRIVET_KERNEL_TIERS": "cuda"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", str(KERNELS / f"test_{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
