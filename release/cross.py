"""`release cross`: op libraries for systems that no machine is here of, as evidence that they compile and link.

A library that was built and audited says nothing about running. Where an emulator knows the CPU, the kernels of every
tier are run on it, which says that they are correct, and nothing of speed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures import ARCHITECTURES, Architecture
from .archive import sha256_file
from .audit import HOST_LIBRARIES
from .elf import max_version, parse_elf
from .errors import BuildError, GateError
from .evidence import GateResult
from .matrix import load_matrix
from .pe import parse_pe
from .process import run
from .source import ROOT

EXPORTS = ("RegisterCustomOps", "trivet_cpu_check_tier", "trivet_cpu_describe", "trivet_cpu_merge_byte_pairs")
# Of Windows itself since Windows 7; the C++ runtime is inside.
WINDOWS_LIBRARIES = {"kernel32.dll", "msvcrt.dll"}
# Of the compiler; an archive brings them.
_COMPILER_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1"}


@dataclass(frozen=True, slots=True)
class CrossBuild:
    toolchain: Path  # CMake's
    compiler: str
    package: str  # of Debian, that brings the compiler
    library: str  # file name
    problems: Callable[[bytes], list[str]]
    emulated: Architecture | None = None  # whose CPUs an emulator has: the tiers are run there


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


def linux_aarch64_problems(data: bytes) -> list[str]:
    """What is wrong with the op library as a shared object for Arm."""
    found = parse_elf(data)
    out = [] if found.machine == "aarch64" else [f"is for {found.machine}"]
    allowed = HOST_LIBRARIES | _COMPILER_LIBRARIES
    out += [
        f"needs {name}, which is neither of the C library nor of the compiler"
        for name in found.needed
        if name not in allowed
    ]
    out += [f"searches libraries in {path}" for path in found.rpath]
    out += ["wants an executable stack"] if found.executable_stack else []
    return out + (["has a segment that no loader accepts"] if found.misaligned else [])


def tier_problems(cpu: str, best: str, tiers: tuple[str, ...], verdicts: Mapping[str, str]) -> list[str]:
    """What is not as it should be on a CPU whose best tier is `best`; `verdicts`: what check_tiers printed, by tier."""
    out = [] if tuple(verdicts) == tiers else [f"{cpu}: the tiers are {', '.join(verdicts)}, not {', '.join(tiers)}"]
    able = tiers[: tiers.index(best) + 1]
    for tier, verdict in verdicts.items():
        expected = "as scalar" if tier in able else "absent, refused"
        if verdict != expected:
            out.append(f"{cpu}: {tier} is {verdict!r}, expected {expected!r}")
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
    "linux-aarch64-glibc-cpu": CrossBuild(
        toolchain=ROOT / "cmake" / "aarch64-linux-gnu.cmake",
        compiler="aarch64-linux-gnu-g++",
        package="g++-aarch64-linux-gnu",
        library="libtrivet_cpu.so",
        problems=linux_aarch64_problems,
        emulated=ARCHITECTURES["aarch64"],
    ),
}


def cross(artifact_id: str, out: Path, evidence: Path) -> GateResult:
    """Build and audit the op library of a tuple; the library goes to `out`, the verdict to `evidence`."""
    entry = load_matrix().find(artifact_id)
    if artifact_id not in BUILDS:
        raise BuildError(f"no cross compiler is known for {artifact_id}; there is one for {', '.join(BUILDS)}")
    build = BUILDS[artifact_id]
    architecture = build.emulated
    tools = {build.compiler: build.package} | ({architecture.qemu: "qemu-user-static"} if architecture else {})
    for program, package in tools.items():
        if shutil.which(program) is None:
            raise BuildError(f"{program} is not installed (Debian: {package})")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trivet-cross-") as folder:
        configure: list[str | Path] = ["cmake", "-S", ROOT, "-B", folder, "--toolchain", build.toolchain]
        run([*configure, "-DTRIVET_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release"])
        targets = ["trivet_cpu", *(["check_tiers"] if architecture else [])]
        run(["cmake", "--build", folder, "--parallel", "2", "--target", *targets], timeout=3600)
        (built,) = Path(folder).rglob(build.library)
        shutil.copyfile(built, out / build.library)
        problems = build.problems((out / build.library).read_bytes())
        details = _details(build, out / build.library) | {"tuple": ": ".join(filter(None, [entry.state, entry.reason]))}
        if architecture is not None:
            (checker,) = Path(folder).rglob("check_tiers")
            details["tiers"] = {cpu: _verdicts(architecture, cpu, checker) for cpu in architecture.best_tiers}
            for cpu, best in architecture.best_tiers.items():
                problems += tier_problems(cpu, best, entry.cpu_tiers, details["tiers"][cpu])
    result = GateResult(
        "op-library",
        "failed" if problems else "passed",
        f"release cross {artifact_id}",
        "; ".join(problems),
        emulated=architecture is not None,
        subject=artifact_id,
        details=details,
    )
    evidence.mkdir(parents=True, exist_ok=True)
    (evidence / f"op-library-{artifact_id}.json").write_bytes(result.report())
    if problems:
        raise GateError(f"{build.library} of {artifact_id}: {'; '.join(problems)}")
    return result


def _details(build: CrossBuild, library: Path) -> dict[str, Any]:
    data = library.read_bytes()
    return {
        "sha256": sha256_file(library),
        "size": len(data),
        "compiler": run([build.compiler, "--version"]).splitlines()[0],
    } | ({"libc_floor": max_version(parse_elf(data).versions, "GLIBC")} if library.suffix == ".so" else {})


def _verdicts(architecture: Architecture, cpu: str, program: Path) -> dict[str, str]:
    """Tier -> what check_tiers says about it on an emulated CPU; what differs is behind its line."""
    command = [architecture.qemu, "-cpu", cpu, str(program)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired as error:
        raise GateError(f"check_tiers did not end within {error.timeout:.0f} s on {cpu}") from error
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    verdicts = {tier: verdict for tier, _, verdict in (line.partition(": ") for line in lines)}
    if done.returncode not in (0, 1) or not verdicts:
        raise GateError(f"check_tiers ended with status {done.returncode} on {cpu}: {done.stderr.strip()[-300:]}")
    return verdicts
