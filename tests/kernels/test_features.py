"""The probes of features.cc, run on emulated CPUs that lack one thing each. A probe that is left out is noticed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("tests/kernels/show_features.cc", "backends/cpu/features.cc", "backends/cpu/dispatch.cc")
QEMU = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64"),
    pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64 (Debian: qemu-user-static)"),
]
ALL = {"sse2", "avx2", "fma", "f16c"}  # qemu's richest CPU; it knows neither AVX-VNNI nor AVX-512


def probe(folder: Path, *changes: tuple[str, str]) -> Path:
    """The program, compiled with these changes to features.cc."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "a C++ compiler is needed, as for the library itself"
    for name in {*SOURCES, *(f"backends/cpu/{header}" for header in ("features.h", "dispatch.h"))}:
        text = (ROOT / name).read_text()
        for old, new in changes if name.endswith("features.cc") else ():
            text = text.replace(old, new)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    program = folder / "show_features"
    command: list[str | Path] = [compiler, "-std=c++20", "-O1", "-static", "-o", program]
    subprocess.run([*command, *(folder / name for name in SOURCES)], check=True)
    return program


def features(program: Path, cpu: str) -> set[str]:
    assert QEMU is not None
    done = subprocess.run([QEMU, "-cpu", cpu, program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return probe(tmp_path_factory.mktemp("probe"))


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ("max", ALL),
        ("max,-xsave", {"sse2"}),  # CPUID announces AVX2, the operating system saves no such registers
        ("max,-avx", {"sse2"}),
        ("max,-avx2", ALL - {"avx2"}),
        ("max,-fma", ALL - {"fma"}),
        ("max,-f16c", ALL - {"f16c"}),
        ("Nehalem", {"sse2"}),
    ],
)
def test_what_is_missing_is_not_found(cpu: str, expected: set[str], program: Path) -> None:
    assert features(program, cpu) == expected


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ("max,vendor=AuthenticAMD,family=26", True),
        ("max,vendor=AuthenticAMD,family=25", False),
        ("max,vendor=GenuineIntel,family=26", False),
    ],
)
def test_which_cpus_prefetch_into_the_first_level(cpu: str, expected: bool, program: Path) -> None:
    assert ("prefetches_into_l1" in features(program, cpu)) == expected


@pytest.mark.parametrize(
    ("cpu", "old", "new"),
    [
        ("max,-xsave", "(xcr0 & 0x06) == 0x06", "true"),
        ("max,-avx2", "bit(ebx, 5)", "true"),
        ("max,-fma", "cpu_avx && cpu_fma", "cpu_avx"),
        ("max,-f16c", "cpu_avx && cpu_f16c", "cpu_avx"),
    ],
)
def test_a_probe_that_is_taken_out(cpu: str, old: str, new: str, tmp_path: Path) -> None:
    """The program then claims what this CPU lacks, so the cases above would fail."""
    assert features(probe(tmp_path, (old, new)), cpu) == ALL


@pytest.mark.parametrize(("cpu", "expected"), [("max", ALL | {"avx_vnni"}), ("max,-xsave", {"sse2"})])
def test_avx_vnni_needs_the_registers_of_avx(cpu: str, expected: set[str], tmp_path: Path) -> None:
    """Of CPUs that have it, which qemu has not: one with a system that does not save the registers."""
    has_it = (("eax >= 1", "true"), ("bit(eax, 4)", "true"))
    assert features(probe(tmp_path, *has_it), cpu) == expected
