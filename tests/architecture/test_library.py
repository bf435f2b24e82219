"""The op library: no link against onnxruntime, nothing exported but its entry points."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "backends" / "cpu" / "libtrivet_cpu.so"


def nm(*options: str) -> list[str]:
    if not LIBRARY.is_file():
        pytest.skip("the op library is not built beside its sources (pip install -e . does that)")
    if not shutil.which("nm"):
        pytest.skip("nm (binutils) is not installed")
    done = subprocess.run(["nm", "-D", *options, str(LIBRARY)], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in done.stdout.splitlines()]


def test_no_undefined_onnxruntime_symbols() -> None:
    undefined = nm("--undefined-only")
    assert undefined
    assert not [name for name in undefined if "Ort" in name or "onnx" in name.lower()]


def test_exports_only_its_entry_points() -> None:
    exported = [name.split("@")[0] for name in nm("--defined-only")]
    assert "RegisterCustomOps" in exported
    assert not [name for name in exported if name != "RegisterCustomOps" and not name.startswith("trivet_")]


def test_does_not_need_the_onnxruntime_library() -> None:
    if not shutil.which("readelf"):
        pytest.skip("readelf (binutils) is not installed")
    nm("--defined-only")
    dynamic = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    needed = [line for line in dynamic.splitlines() if "NEEDED" in line]
    assert needed
    assert not [line for line in needed if "onnxruntime" in line]
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
