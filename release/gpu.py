"""Gates about GPUs: the machine code of a CUDA archive, SM by SM, and what a program says where there is no GPU."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .cubins import (
    CUDA_LIBRARY,
    DeviceCode,
    code_problems,
    declared_architectures,
    read_device_code,
    sm_facts,
    sm_problems,
)
from .cuda import cuobjdump
from .errors import ReleaseError
from .evidence import GateResult
from .matrix import Tuple

_NO_GPU = {"cuda": "no usable NVIDIA driver", "cpu": "this trivet was built without CUDA"}
_NO_HARDWARE = "hardware absent: no NVIDIA GPU of this SM runs anything during verification"


def device_code_problems(tree: Path, manifest: Mapping[str, Any], entry: Tuple) -> list[str]:
    """Gate "device-code": no code for GPUs but that of a CUDA archive, and that as kernels.json declares it."""
    if entry.backend != "cuda":
        libraries = sorted(tree.rglob("libtrivet_*.so"))
        return [
            f"the back end is {entry.backend}, yet there is {path.name}"
            for path in libraries
            if "_cpu" not in path.name
        ]
    code, declared = _code(tree), declared_architectures()
    out = code_problems(code, declared)
    stated = [{name: value for name, value in part.items() if name != "evidence"} for part in manifest["sms"]]
    found = sm_facts(entry.sms, code, declared)
    return out + [
        f"the manifest says {left} of SM {left['name']}, the library holds {right}"
        for left, right in zip(stated, found, strict=True)
        if left != right
    ]


def sm_results(tree: Path, entry: Tuple, digest: str) -> list[GateResult]:
    """Evidence of each SM: its code is judged, nothing was run on it."""
    if not entry.sms:
        return []
    declared = declared_architectures()
    try:
        problems = {sm: sm_problems(sm, _code(tree), declared) for sm in entry.sms}
    except (ReleaseError, OSError, ValueError) as error:
        problems = {sm: [f"{type(error).__name__}: {error}"] for sm in entry.sms}
    out = []
    for sm, found in problems.items():
        state, command = "failed" if found else "passed", f"release verify (gate sm-code, {sm})"
        out.append(GateResult("sm-code", state, command, "; ".join(found), subject=sm, archive_sha256=digest))
        out += [
            GateResult(gate, "absent", "none", _NO_HARDWARE, subject=sm, archive_sha256=digest)
            for gate in ("sm-run", "sm-tokens", "sm-competitor")
        ]
    return out


def _code(tree: Path) -> DeviceCode:
    return read_device_code(tree / CUDA_LIBRARY, cuobjdump())


def gpu_absent_problems(run: Callable[..., subprocess.CompletedProcess[str]], model: Path, backend: str) -> list[str]:
    """Gate "gpu-absent": without a GPU the CPU answers, loudly; who insists on a GPU gets an error that says why.

    `run` runs the program with the given arguments.
    """
    out, reason = [], _NO_GPU[backend]
    for arguments, status, says in (
        (["--device", "cuda"], 0, "RUNNING ON THE CPU, a GPU was asked for: no GPU can be used: "),
        (["--device", "cuda:0"], 1, "device 'cuda:0' cannot be used: "),
        (["--require-gpu"], 1, "a GPU is required (require_gpu) and none can be used: "),
    ):
        prompt = ["complete", "--model", str(model), "--max-tokens", "2", "--temperature", "0", "Water boils at"]
        done = run(*prompt, *arguments)
        answered = bool(done.stdout.strip())
        if (
            done.returncode != status
            or answered != (status == 0)
            or says not in done.stderr
            or reason not in done.stderr
        ):
            out.append(
                f"`trivet complete {' '.join(arguments)}` ended with status {done.returncode} and {done.stdout!r}, "
                f"expected {status}, {says!r} and {reason!r}: {done.stderr.strip()[-300:]}"
            )
    return out


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
