"""`release cross`: op libraries for systems that no machine is here of, as evidence that they compile and link.

A library that was built and audited says nothing about running. Where an emulator knows the CPU, the kernels of every
tier are run on it, which says that they are correct, and nothing of speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .architectures import ARCHITECTURES
from .archive import sha256_file
from .audit import build_paths
from .cross_audit import linux_aarch64_problems, linux_musl_problems, macos_problems, tier_problems, windows_problems
from .cuda import PINS, pinned_packages
from .elf import is_elf, max_version, parse_elf
from .errors import BuildError, GateError
from .evidence import GateResult
from .macho import parse_macho
from .matrix import load_matrix
from .process import run
from .root import cache_folder
from .source import ROOT

ZIG = PINS / "requirements-zig.txt"


@dataclass(frozen=True, slots=True)
class CrossBuild:
    toolchain: Path  # CMake's
    compiler: tuple[str, ...]  # the command
    package: str  # of Debian, that brings the compiler; empty = it is pinned in requirements-zig.txt
    library: str  # file name
    problems: Callable[[bytes], list[str]]
    qemu: str = ""  # program that emulates `cpus`; the tiers are run there
    cpus: Mapping[str, str] = field(default_factory=dict)  # model of qemu -> the best tier there


# Tuple -> how its op library for the CPU is cross-compiled.
BUILDS: Mapping[str, CrossBuild] = {
    "windows-x86_64-cpu": CrossBuild(
        toolchain=ROOT / "cmake" / "x86_64-w64-mingw32.cmake",
        compiler=("x86_64-w64-mingw32-g++-posix",),
        package="g++-mingw-w64-x86-64-posix",
        library="libtrivet_cpu.dll",
        problems=windows_problems,
    ),
    "linux-aarch64-glibc-cpu": CrossBuild(
        toolchain=ROOT / "cmake" / "aarch64-linux-gnu.cmake",
        compiler=("aarch64-linux-gnu-g++",),
        package="g++-aarch64-linux-gnu",
        library="libtrivet_cpu.so",
        problems=linux_aarch64_problems,
        qemu=ARCHITECTURES["aarch64"].qemu,
        cpus=ARCHITECTURES["aarch64"].best_tiers,
    ),
    "linux-x86_64-musl-cpu-static": CrossBuild(
        toolchain=ROOT / "cmake" / "x86_64-linux-musl.cmake",
        compiler=("zig", "c++"),
        package="",
        library="libtrivet_cpu.so",
        problems=linux_musl_problems,
        qemu=ARCHITECTURES["x86_64"].qemu,
        cpus={"Opteron_G1": "baseline", "max": "avx2"},  # no qemu has AVX-VNNI or AVX-512
    ),
    "macos-arm64-metal": CrossBuild(
        toolchain=ROOT / "cmake" / "arm64-macos.cmake",
        compiler=("zig", "c++"),
        package="",
        library="libtrivet_cpu.dylib",
        problems=macos_problems,
    ),
}


def cross(artifact_id: str, out: Path, evidence: Path) -> GateResult:
    """Build and audit the op library of a tuple; the library goes to `out`, the verdict to `evidence`."""
    entry = load_matrix().find(artifact_id)
    if artifact_id not in BUILDS:
        raise BuildError(f"no cross compiler is known for {artifact_id}; there is one for {', '.join(BUILDS)}")
    build = BUILDS[artifact_id]
    environment = _environment(build)
    out.mkdir(parents=True, exist_ok=True)
    library = out / build.library
    with tempfile.TemporaryDirectory(prefix="trivet-cross-") as folder:
        configure: list[str | Path] = ["cmake", "-S", ROOT, "-B", folder, "--toolchain", build.toolchain]
        run([*configure, "-DTRIVET_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release"], env=environment)
        targets = ["trivet_cpu", *(["check_tiers"] if build.cpus else [])]
        run(["cmake", "--build", folder, "--parallel", "2", "--target", *targets], env=environment, timeout=3600)
        (built,) = Path(folder).rglob(build.library)
        shutil.copyfile(built, library)
        problems = build.problems(library.read_bytes())
        problems += [f"holds a build path: {path}" for path in build_paths(library.read_bytes(), (folder, str(ROOT)))]
        details = _details(library) | {"tuple": ": ".join(filter(None, [entry.state, entry.reason]))}
        details["compiler"] = run([*build.compiler, "--version"], env=environment).splitlines()[0]
        if build.cpus:
            (checker,) = Path(folder).rglob("check_tiers")
            details["tiers"] = {cpu: _verdicts(build.qemu, cpu, checker) for cpu in build.cpus}
            for cpu, best in build.cpus.items():
                problems += tier_problems(cpu, best, entry.cpu_tiers, details["tiers"][cpu])
    result = GateResult(
        "op-library",
        "failed" if problems else "passed",
        f"release cross {artifact_id}",
        "; ".join(problems),
        emulated=bool(build.cpus),
        subject=artifact_id,
        details=details,
    )
    evidence.mkdir(parents=True, exist_ok=True)
    (evidence / f"op-library-{artifact_id}.json").write_bytes(result.report())
    if problems:
        raise GateError(f"{build.library} of {artifact_id}: {'; '.join(problems)}")
    return result


def _environment(build: CrossBuild) -> dict[str, str]:
    """Of the build's commands, with the pinned compiler on the PATH; BuildError for a tool that is not there."""
    environment = dict(os.environ)
    if not build.package:
        zig = pinned_packages(ZIG) / "ziglang"
        environment["PATH"] = f"{zig}{os.pathsep}{environment['PATH']}"
        # What zig compiles of the C and C++ libraries, minutes each time, is named after all that decides about it.
        compiled = str(cache_folder() / "zig-compiled")
        environment |= {"ZIG_GLOBAL_CACHE_DIR": compiled, "ZIG_LOCAL_CACHE_DIR": compiled}
    tools = {build.compiler[0]: build.package} | ({build.qemu: "qemu-user-static"} if build.qemu else {})
    for program, package in tools.items():
        if shutil.which(program, path=environment["PATH"]) is None:
            raise BuildError(f"{program} is not installed (Debian: {package})")
    return environment


def _details(library: Path) -> dict[str, Any]:
    data = library.read_bytes()
    found: dict[str, Any] = {"sha256": sha256_file(library), "size": len(data)}
    if is_elf(data) and (floor := max_version(parse_elf(data).versions, "GLIBC")):
        found["libc_floor"] = floor
    if library.suffix == ".dylib":
        found["macos_floor"] = parse_macho(data).minimum_os
    return found


def _verdicts(qemu: str, cpu: str, program: Path) -> dict[str, str]:
    """Tier -> what check_tiers says about it on an emulated CPU; what differs is behind its line."""
    try:
        done = subprocess.run([qemu, "-cpu", cpu, program], capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired as error:
        raise GateError(f"check_tiers did not end within {error.timeout:.0f} s on {cpu}") from error
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    verdicts = {tier: verdict for tier, _, verdict in (line.partition(": ") for line in lines)}
    if done.returncode not in (0, 1) or not verdicts:
        raise GateError(f"check_tiers ended with status {done.returncode} on {cpu}: {done.stderr.strip()[-300:]}")
    return verdicts
