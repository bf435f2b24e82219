"""`release cross`: op libraries for systems that no archive is built for, as evidence that they compile and link.

A library that was built and audited says nothing about running: there is no such machine here, and no archive.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .archive import sha256_file
from .errors import BuildError, GateError
from .evidence import GateResult
from .matrix import load_matrix
from .pe import parse_pe
from .process import run
from .source import ROOT

EXPORTS = ("RegisterCustomOps", "trivet_cpu_check_tier", "trivet_cpu_describe")
# Of Windows itself since Windows 7; the C++ runtime is inside.
WINDOWS_LIBRARIES = {"kernel32.dll", "msvcrt.dll"}


@dataclass(frozen=True, slots=True)
class CrossBuild:
    toolchain: Path  # CMake's
    compiler: str
    package: str  # of Debian, that brings the compiler
    library: str  # file name
    problems: Callable[[bytes], list[str]]


def windows_problems(data: bytes) -> list[str]:
    """What is wrong with the op library as a DLL."""
    found = parse_pe(data)
    out = [] if found.machine == "x86_64" else [f"is for {found.machine}"]
    out += [f"needs {name}, which Windows does not bring" for name in found.imports if name not in WINDOWS_LIBRARIES]
    if found.exports != EXPORTS:
        out.append(f"exports {', '.join(found.exports) or 'nothing'}; expected {', '.join(EXPORTS)}")
    if found.timestamp:
        out.append("holds the time of its build")
    return out


# Tuple -> how its op library is cross-compiled.
BUILDS: Mapping[str, CrossBuild] = {
    "windows-x86_64-cpu": CrossBuild(
        toolchain=ROOT / "cmake" / "x86_64-w64-mingw32.cmake",
        compiler="x86_64-w64-mingw32-g++-posix",
        package="g++-mingw-w64-x86-64-posix",
        library="libtrivet_cpu.dll",
        problems=windows_problems,
    ),
}


def cross(artifact_id: str, out: Path, evidence: Path) -> GateResult:
    """Build and audit the op library of a tuple; the library goes to `out`, the verdict to `evidence`."""
    entry = load_matrix().find(artifact_id)
    if artifact_id not in BUILDS:
        raise BuildError(f"no cross compiler is known for {artifact_id}; there is one for {', '.join(BUILDS)}")
    build = BUILDS[artifact_id]
    if shutil.which(build.compiler) is None:
        raise BuildError(f"{build.compiler} is not installed (Debian: {build.package})")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trivet-cross-") as folder:
        configure: list[str | Path] = ["cmake", "-S", ROOT, "-B", folder, "--toolchain", build.toolchain]
        run([*configure, "-DTRIVET_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release"])
        run(["cmake", "--build", folder, "--target", "trivet_cpu", "--parallel", "2"], timeout=3600)
        (built,) = Path(folder).rglob(build.library)
        shutil.copyfile(built, out / build.library)
    problems = build.problems((out / build.library).read_bytes())
    result = GateResult(
        "op-library",
        "failed" if problems else "passed",
        f"release cross {artifact_id}",
        "; ".join(problems),
        subject=artifact_id,
        details={
            "sha256": sha256_file(out / build.library),
            "size": (out / build.library).stat().st_size,
            "compiler": run([build.compiler, "--version"]).splitlines()[0],
            "tuple": f"{entry.state}: {entry.reason}",
        },
    )
    evidence.mkdir(parents=True, exist_ok=True)
    (evidence / f"op-library-{artifact_id}.json").write_bytes(result.report())
    if problems:
        raise GateError(f"{build.library} of {artifact_id}: {'; '.join(problems)}")
    return result
