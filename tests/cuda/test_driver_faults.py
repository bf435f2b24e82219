"""The built library with drivers that do not work: stand-ins for libcuda.so.1, so no GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trivet.backends.cuda.device import describe_cuda

pytestmark = pytest.mark.skipif(describe_cuda()["library"] is None, reason="libtrivet_cuda is not built")

NO_DEVICE, UNKNOWN = 100, 999  # CUresult
DRIVER = """
int cuDriverGetVersion(int* version) { *version = %d; return 0; }
int cuInit(unsigned flags) { (void)flags; return %d; }
"""
CHILD = """
import json, sys
from trivet.backends.cuda.device import describe_cuda
from trivet.backends.devices import choose_device
facts, choices = describe_cuda(), {}
for device, require_gpu in (("cuda", False), ("cuda", True), ("cuda:0", False), ("auto", False)):
    try:
        choice = choose_device(device, require_gpu=require_gpu)
        choices[f"{device} {require_gpu}"] = [choice.name, choice.fallback]
    except Exception as error:
        choices[f"{device} {require_gpu}"] = [type(error).__name__, str(error)]
print(json.dumps({"facts": facts, "choices": choices}))
"""


@pytest.fixture
def with_driver(tmp_path: Path) -> Callable[..., Any]:
    """with_driver(version, result of cuInit, environment) -> what CHILD finds; version None: no driver at all."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")

    def run(version: int | None, init: int = 0, **environment: str) -> Any:
        library = tmp_path / "libcuda.so.1"
        source = tmp_path / "driver.c"
        source.write_text("" if version is None else DRIVER % (version, init))
        if version is None:
            library.write_bytes(b"")  # found first, and no library
        else:
            subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        found = os.environ | environment | {"LD_LIBRARY_PATH": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", CHILD], env=found, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    ("version", "init", "environment", "reason"),
    [
        (None, 0, {}, "no usable NVIDIA driver: none is installed"),
        (12040, 0, {}, "no usable NVIDIA driver: it supports CUDA 12.4, this trivet needs 13."),
        (13000, NO_DEVICE, {}, "no CUDA device is visible"),
        (13000, NO_DEVICE, {"CUDA_VISIBLE_DEVICES": ""}, "no CUDA device is visible (CUDA_VISIBLE_DEVICES=)"),
        (13000, UNKNOWN, {}, "no usable NVIDIA driver: unknown error"),
    ],
    ids=["none", "too_old", "no_device", "hidden", "broken"],
)
def test_a_driver_that_does_not_work_is_named(
    with_driver: Callable[..., Any], version: int | None, init: int, environment: dict[str, str], reason: str
) -> None:
    result = with_driver(version, init, **environment)
    assert result["facts"]["devices"] == [] and result["facts"]["error"].startswith(reason)
    choices = result["choices"]
    assert choices["cuda False"][0] == "cpu" and reason in choices["cuda False"][1]
    assert choices["cuda True"][0] == "UnsupportedDeviceError" and reason in choices["cuda True"][1]
    assert choices["cuda:0 False"][0] == "UnsupportedDeviceError" and reason in choices["cuda:0 False"][1]
    assert choices["auto False"] == ["cpu", ""]
