"""Op libraries of other systems: what the audits of their files see; and real ones where they are asked for."""

from __future__ import annotations

import json
import os
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from release.cross import BUILDS, EXPORTS, cross, linux_aarch64_problems, tier_problems, windows_problems
from release.errors import BuildError, GateError, MatrixError
from release.matrix import load_matrix
from release.pe import parse_pe

_BASE, _FILE = 0x1000, 0x200  # where the one section lies, in memory and in the file


def pe(
    *,
    machine: int = 0x8664,
    imports: Sequence[str] = ("KERNEL32.dll",),
    exports: Sequence[str] = EXPORTS,
    stamp: int = 0,
) -> bytes:
    """A DLL with these tables and no code."""
    body = bytearray(20 * (len(imports) + 1) + 40 + 4 * len(exports))

    def text(value: str) -> int:
        body.extend(value.encode() + b"\0")
        return _BASE + len(body) - len(value) - 1

    for index, name in enumerate(imports):
        struct.pack_into("<I", body, 20 * index + 12, text(name))
    table = 20 * (len(imports) + 1)
    struct.pack_into("<I4xI", body, table + 24, len(exports), _BASE + table + 40)
    for index, name in enumerate(exports):
        struct.pack_into("<I", body, table + 40 + 4 * index, text(name))
    tables = struct.pack("<IIII", _BASE + table, 40, _BASE, 20)
    optional = struct.pack("<H110x", 0x20B) + tables + bytes(14 * 8)
    head = b"MZ".ljust(60, b"\0") + struct.pack("<I", 64)
    head += b"PE\0\0" + struct.pack("<HHIIIHH", machine, 1, stamp, 0, 0, len(optional), 0)
    section = b".data".ljust(8, b"\0") + struct.pack("<IIII16x", len(body), _BASE, len(body), _FILE)
    return (head + optional + section).ljust(_FILE, b"\0") + bytes(body)


def test_a_dll_is_read() -> None:
    found = parse_pe(pe(imports=("msvcrt.dll", "KERNEL32.dll"), stamp=7))
    assert found.machine == "x86_64" and found.timestamp == 7
    assert found.imports == ("kernel32.dll", "msvcrt.dll") and found.exports == EXPORTS


@pytest.mark.parametrize("data", [b"", b"MZ", pe()[:100], b"MZ".ljust(60, b"\0") + struct.pack("<I", 64) + b"XX\0\0"])
def test_a_damaged_dll_is_refused(data: bytes) -> None:
    with pytest.raises(GateError, match="damaged PE file"):
        parse_pe(data)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (pe(machine=0xAA64), "is for arm64"),
        (pe(imports=("KERNEL32.dll", "libstdc++-6.dll")), "needs libstdc++-6.dll, which Windows does not bring"),
        (pe(exports=EXPORTS[:2]), "exports RegisterCustomOps, trivet_cpu_check_tier; expected"),
        (pe(exports=()), "exports nothing"),
        (pe(stamp=1_700_000_000), "holds the time of its build"),
    ],
)
def test_a_dll_that_is_not_as_it_should_be(data: bytes, complaint: str) -> None:
    assert windows_problems(pe()) == []
    (found,) = windows_problems(data)
    assert complaint in found


def test_only_tuples_of_other_machines_are_cross_built(tmp_path: Path) -> None:
    for artifact_id in BUILDS:
        assert load_matrix().find(artifact_id).max_channel != "stable"
    with pytest.raises(BuildError, match="no cross compiler is known for linux-x86_64-glibc-cpu"):
        cross("linux-x86_64-glibc-cpu", tmp_path, tmp_path)
    with pytest.raises(MatrixError, match="holds no artifact"):
        cross("beos-x86_64-cpu", tmp_path, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif("TRIVET_TEST_CROSS" not in os.environ, reason="compiles for minutes; set TRIVET_TEST_CROSS=1")
def test_the_windows_library(tmp_path: Path) -> None:
    result = cross("windows-x86_64-cpu", tmp_path / "out", tmp_path / "evidence")
    report = json.loads((tmp_path / "evidence" / "op-library-windows-x86_64-cpu.json").read_text())
    assert report["state"] == result.state == "passed"
    assert report["details"]["tuple"].startswith("blocked: hardware absent: Windows")


TIERS = ("scalar", "neon", "dotprod", "i8mm")
GOOD = {"scalar": "as scalar", "neon": "as scalar", "dotprod": "absent, refused", "i8mm": "absent, refused"}


def test_tiers_of_an_emulated_cpu() -> None:
    assert load_matrix().find("linux-aarch64-glibc-cpu").cpu_tiers == TIERS
    assert tier_problems("cortex-a53", "neon", TIERS, GOOD) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"neon": "DIFFERS:"}, "neon is 'DIFFERS:', expected 'as scalar'"),
        ({"i8mm": "ABSENT AND NOT REFUSED"}, "i8mm is 'ABSENT AND NOT REFUSED', expected 'absent, refused'"),
        ({"dotprod": "as scalar"}, "dotprod is 'as scalar', expected 'absent, refused'"),
        ({"sve": "as scalar"}, "the tiers are scalar, neon, dotprod, i8mm, sve, not"),
    ],
)
def test_a_tier_that_is_not_as_it_should_be(changes: dict[str, str], complaint: str) -> None:
    assert any(complaint in text for text in tier_problems("cortex-a53", "neon", TIERS, GOOD | changes))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="takes this machine's Python as a file that is not for Arm")
def test_a_library_for_another_machine() -> None:
    program = Path("/proc/self/exe").read_bytes()
    assert linux_aarch64_problems(program)[0] == "is for x86_64"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif("TRIVET_TEST_CROSS" not in os.environ, reason="compiles for minutes; set TRIVET_TEST_CROSS=1")
def test_the_arm_library(tmp_path: Path) -> None:
    cross("linux-aarch64-glibc-cpu", tmp_path / "out", tmp_path / "evidence")
    report = json.loads((tmp_path / "evidence" / "op-library-linux-aarch64-glibc-cpu.json").read_text())
    assert report["state"] == "passed" and report["emulated"] is True
    assert report["details"]["tiers"]["cortex-a53"] == GOOD
    assert set(report["details"]["tiers"]["max"].values()) == {"as scalar"}
    assert report["details"]["tuple"] == "buildable"
