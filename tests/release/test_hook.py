"""Anybody can freeze a program that imports trivet: the hook that the package brings collects what is needed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_bundle import ROOT

PROGRAM = """
import json, sys
import trivet
from trivet.backends.library import probe_cpu
from trivet.runtime.model_store.catalogue import catalogue

print(json.dumps({"version": trivet.__version__, "tier": probe_cpu()["best_tier"], "catalogue": bool(catalogue())}))
"""


def _needed() -> str | None:
    for name in ("trivet", "pyinstaller"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed in this environment"
    return None


@pytest.mark.slow
@pytest.mark.skipif(_needed() is not None, reason=str(_needed()))
@pytest.mark.timeout(600)
def test_a_ten_line_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "PyInstaller",
        "--log-level",
        "WARN",
        "--noconfirm",
        "--exclude-module",
        "readline",
    ]
    environment = os.environ | {"PYINSTALLER_CONFIG_DIR": str(tmp_path / "config")}
    done = subprocess.run(
        [*command, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr[-2000:]
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    program = tmp_path / "dist" / "program" / "program"
    done = subprocess.run([program], env=clean, capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert answer["tier"] in ("scalar", "baseline", "avx2", "avx_vnni", "avx512_vnni") and answer["catalogue"]
    assert f'__version__ = "{answer["version"]}"' in (ROOT / "packaging/python/trivet/__init__.py").read_text()
