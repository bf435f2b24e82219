"""Op libraries of other systems: what the audits of their files see; and real ones where they are asked for."""

from __future__ import annotations

import json
import os
import platform
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_up_bundle import elf

from release.cross import BUILDS, cross
from release.cross_audit import (
    EXPORTS,
    MACOS_FLOOR,
    linux_aarch64_problems,
    linux_musl_problems,
    macos_problems,
    tier_problems,
    windows_problems,
)
from release.elf import parse_elf
from release.errors import BuildError, GateError, MatrixError
from release.macho import parse_macho
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


def test_exports_of_a_shared_object_are_read() -> None:
    assert parse_elf(elf(exports=("b", "a", "c"))).exports == ("a", "b", "c")
    assert parse_elf(elf()).exports == ()


MUSL: dict[str, Any] = {"needed": ("libc.so",), "versions": {}, "exports": EXPORTS}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"machine": 183}, "is for aarch64"),
        ({"needed": ("libc.so", "libstdc++.so.6")}, "needs libstdc++.so.6, which is not musl's C library"),
        ({"needed": ("libc.so.6",)}, "needs libc.so.6, which is not musl's C library"),
        ({"versions": {"libc.so": ("GLIBC_2.17",)}}, "needs symbols of version GLIBC_2.17; musl's have none"),
        ({"runpath": "/tmp/build"}, "searches libraries in /tmp/build"),
        ({"stack_flags": 7}, "wants an executable stack"),
        ({"exports": (*EXPORTS, "zlib")}, "trivet_cpu_merge_byte_pairs, zlib; expected"),
    ],
)
def test_a_musl_library_that_is_not_as_it_should_be(changes: dict[str, Any], complaint: str) -> None:
    assert linux_musl_problems(elf(**MUSL)) == []
    (found,) = linux_musl_problems(elf(**(MUSL | changes)))
    assert complaint in found


def _command(kind: int, text: str, head: bytes) -> bytes:
    """A load command with `head` before its string."""
    body = head + text.encode() + b"\0"
    body += bytes(-(8 + len(body)) % 8)
    return struct.pack("<II", kind, 8 + len(body)) + body


def _trie(names: Sequence[str]) -> bytes:
    """An export trie whose root has one edge for each name; every name ends in a node with a payload of two bytes."""
    nodes = b"\x02\0\0\0"
    size = 2 + sum(len(name) + 1 + 2 for name in names)  # a node's offset takes two bytes
    edges = b""
    for index, name in enumerate(names):
        offset = size + index * len(nodes)
        edges += name.encode() + b"\0" + bytes([offset & 0x7F | 0x80, offset >> 7])
    return bytes([0, len(names)]) + edges + nodes * len(names)


def macho(
    *,
    machine: int = 0x0100000C,
    file_type: int = 6,
    needed: Sequence[str] = ("/usr/lib/libSystem.B.dylib",),
    name: str = "@rpath/libtrivet_cpu.dylib",
    rpath: Sequence[str] = (),
    system: tuple[int, int] = (1, 11 << 16),
    exports: Sequence[str] = EXPORTS,
    signed: bool = True,
    in_trie_command: bool = False,
) -> bytes:
    """A dylib with these load commands and no code."""
    dylib = struct.pack("<IIII", 24, 0, 0, 0)
    commands = [_command(0xD, name, dylib)] if name else []
    commands += [_command(0xC, library, dylib) for library in needed]
    commands += [_command(0x8000001C, path, struct.pack("<I", 12)) for path in rpath]
    commands.append(struct.pack("<IIIIII", 0x32, 24, *system, 0, 0))
    commands += [struct.pack("<IIII", 0x1D, 16, 0, 0)] if signed else []
    trie = _trie([f"_{export}" for export in exports])
    kind, table = (0x80000033, 16) if in_trie_command else (0x80000022, 48)
    size = sum(map(len, commands)) + table
    place = struct.pack("<II", 32 + size, len(trie))
    commands.append(struct.pack("<II", kind, table) + bytes(table - 16) + place)
    return struct.pack("<IIIIIIII", 0xFEEDFACF, machine, 0, file_type, len(commands), size, 0, 0) + b"".join(
        [*commands, trie]
    )


@pytest.mark.parametrize("in_trie_command", [False, True])
def test_a_dylib_is_read(in_trie_command: bool) -> None:
    found = parse_macho(macho(rpath=("@loader_path",), system=(1, 14 << 16 | 2 << 8), in_trie_command=in_trie_command))
    assert (found.machine, found.file_type, found.platform, found.minimum_os) == ("arm64", "dylib", "macOS", "14.2")
    assert found.needed == ("/usr/lib/libSystem.B.dylib",) and found.install_name == "@rpath/libtrivet_cpu.dylib"
    assert found.rpath == ("@loader_path",) and found.exports == EXPORTS and found.is_signed


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "damaged"),
        (macho()[:60], "beyond the table"),
        (b"\xfe\xed\xfa\xcf" + macho()[4:], "not 64-bit little-endian"),
        (macho(exports=("a",)).replace(b"_a\0\x87\0", b"_a\0\x80\0"), "cycle"),
        (b"\xca\xfe\xba\xbe" + bytes(100), "several architectures"),
    ],
)
def test_a_damaged_dylib_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(GateError, match=complaint):
        parse_macho(data)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"machine": 0x01000007}, "is for x86_64"),
        ({"file_type": 8}, "is a bundle, not a dylib"),
        (
            {"needed": ("/usr/lib/libSystem.B.dylib", "/opt/x/libz.dylib")},
            "needs /opt/x/libz.dylib, which macOS does not",
        ),
        ({"rpath": ("/tmp/build",)}, "searches libraries in /tmp/build"),
        ({"name": "/tmp/build/libtrivet_cpu.dylib"}, "calls itself /tmp/build/libtrivet_cpu.dylib"),
        ({"name": ""}, "calls itself None"),
        ({"system": (2, 11 << 16)}, "is for 2"),
        ({"system": (1, 26 << 16)}, f"needs macOS 26.0; expected {MACOS_FLOOR} at most"),
        ({"signed": False}, "is not signed"),
        ({"exports": (*EXPORTS, "_ZNSt3__16vectorE")}, "_ZNSt3__16vectorE, trivet_cpu_check_tier"),
        ({"exports": EXPORTS[:3]}, "exports RegisterCustomOps, trivet_cpu_check_tier, trivet_cpu_dequantize; expected"),
    ],
)
def test_a_dylib_that_is_not_as_it_should_be(changes: dict[str, Any], complaint: str) -> None:
    assert macos_problems(macho()) == macos_problems(macho(exports=(*EXPORTS, "__dso_handle", "_Znwm"))) == []
    (found,) = macos_problems(macho(**changes))
    assert complaint in found


def test_the_floor_of_macos_is_what_the_compiler_is_told() -> None:
    assert f"aarch64-macos.{MACOS_FLOOR})" in BUILDS["macos-arm64-metal"].toolchain.read_text()


def test_only_tuples_of_other_machines_are_cross_built(tmp_path: Path) -> None:
    for artifact_id in BUILDS:
        assert load_matrix().find(artifact_id).max_channel != "stable"
    with pytest.raises(BuildError, match="no cross compiler is known for linux-x86_64-glibc-cpu"):
        cross("linux-x86_64-glibc-cpu", tmp_path, tmp_path)
    with pytest.raises(MatrixError, match="holds no artifact"):
        cross("beos-x86_64-cpu", tmp_path, tmp_path)


def compiles(test: Callable[[Path], None]) -> Callable[[Path], None]:
    """Marks a test that builds a library for another system."""
    reason = "compiles for minutes; set TRIVET_TEST_CROSS=1"
    skip = pytest.mark.skipif("TRIVET_TEST_CROSS" not in os.environ, reason=reason)
    marked: Callable[[Path], None] = pytest.mark.slow(pytest.mark.timeout(1800)(skip(test)))
    return marked


def report_of(artifact_id: str, folder: Path) -> dict[str, Any]:
    """What is written about a library that was built and found good."""
    result = cross(artifact_id, folder / "out", folder / "evidence")
    report: dict[str, Any] = json.loads((folder / "evidence" / f"op-library-{artifact_id}.json").read_text())
    assert report["state"] == result.state == "passed"
    return report


@compiles
def test_the_windows_library(tmp_path: Path) -> None:
    report = report_of("windows-x86_64-cpu", tmp_path)
    assert report["emulated"] is False
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


@compiles
def test_the_arm_library(tmp_path: Path) -> None:
    report = report_of("linux-aarch64-glibc-cpu", tmp_path)
    assert report["emulated"] is True
    assert report["details"]["tiers"]["cortex-a53"] == GOOD
    assert set(report["details"]["tiers"]["max"].values()) == {"as scalar"}
    assert report["details"]["tuple"] == "buildable"


@compiles
def test_the_musl_library(tmp_path: Path) -> None:
    report = report_of("linux-x86_64-musl-cpu-static", tmp_path)
    assert report["emulated"] is True
    assert report["details"]["tiers"]["max"] == {
        "scalar": "as scalar", "baseline": "as scalar", "avx2": "as scalar",
        "avx_vnni": "absent, refused", "avx512_vnni": "absent, refused",
    }  # fmt: skip
    assert report["details"]["tuple"].startswith("blocked: no musllinux wheel")


@compiles
def test_the_macos_library(tmp_path: Path) -> None:
    report = report_of("macos-arm64-metal", tmp_path)
    assert report["emulated"] is False
    assert report["details"]["macos_floor"] == MACOS_FLOOR
    assert report["details"]["tuple"].startswith("blocked: hardware absent: macOS")
