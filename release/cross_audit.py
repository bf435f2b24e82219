"""What an op library for another system may need, export and say: the static half of `release cross`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .audit import HOST_LIBRARIES
from .elf import parse_elf, version_key
from .macho import parse_macho
from .pe import parse_pe

EXPORTS = (
    "RegisterCustomOps",
    "trivet_cpu_check_tier",
    "trivet_cpu_dequantize",
    "trivet_cpu_describe",
    "trivet_cpu_map_cached_pages",
    "trivet_cpu_merge_byte_pairs",
)
# Of Windows itself since Windows 7; the C++ runtime is inside.
WINDOWS_LIBRARIES = {"kernel32.dll", "msvcrt.dll"}
# Of the compiler; an archive brings them.
_COMPILER_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1"}
# The whole C library of a system with musl; its loader knows it by this name whatever the file is called.
_MUSL_LIBRARY = "libc.so"
# Of macOS itself; the C++ runtime is inside.
_MACOS_LIBRARY = "/usr/lib/libSystem.B.dylib"
# What zig's linker exports beside what it is told: C++'s operators new and delete, of the library inside, and its own.
_ZIG_EXPORTS = re.compile(r"_Z(?:nw|na|dl|da)\w*|__dso_handle|_mh_dylib_header")
# The oldest macOS, as cmake/arm64-macos.cmake says: the first one that ran on Arm.
MACOS_FLOOR = "11.0"


def windows_problems(data: bytes) -> list[str]:
    """What is wrong with the op library as a DLL."""
    found = parse_pe(data)
    out = [] if found.machine == "x86_64" else [f"is for {found.machine}"]
    out += [f"needs {name}, which Windows does not bring" for name in found.imports if name not in WINDOWS_LIBRARIES]
    out += _export_problems(found.exports)
    if found.timestamp:
        out.append("holds the time of its build")
    return out


def linux_aarch64_problems(data: bytes) -> list[str]:
    """What is wrong with the op library as a shared object for Arm."""
    allowed = HOST_LIBRARIES | _COMPILER_LIBRARIES
    return _elf_problems(data, "aarch64", allowed, "neither of the C library nor of the compiler")


def linux_musl_problems(data: bytes) -> list[str]:
    """What is wrong with the op library as a shared object for a system with musl on x86-64."""
    out = _elf_problems(data, "x86_64", {_MUSL_LIBRARY}, "not musl's C library")
    versions = parse_elf(data).versions
    return out + [f"needs symbols of version {version}; musl's have none" for version in versions]


def _elf_problems(data: bytes, machine: str, allowed: set[str], otherwise: str) -> list[str]:
    found = parse_elf(data)
    out = [] if found.machine == machine else [f"is for {found.machine}"]
    out += [f"needs {name}, which is {otherwise}" for name in found.needed if name not in allowed]
    out += [f"searches libraries in {path}" for path in found.rpath]
    out += ["wants an executable stack"] if found.executable_stack else []
    out += ["has a segment that no loader accepts"] if found.misaligned else []
    return out + _export_problems(found.exports)


def macos_problems(data: bytes) -> list[str]:
    """What is wrong with the op library as a dylib for macOS on Arm."""
    found = parse_macho(data)
    out = [] if found.machine == "arm64" else [f"is for {found.machine}"]
    out += [] if found.file_type == "dylib" else [f"is a {found.file_type}, not a dylib"]
    out += [f"needs {name}, which macOS does not bring" for name in found.needed if name != _MACOS_LIBRARY]
    out += [f"searches libraries in {path}" for path in found.rpath]
    if found.install_name is None or not found.install_name.startswith("@rpath/"):
        out.append(f"calls itself {found.install_name}; expected a name below @rpath, so that it may lie anywhere")
    if found.platform != "macOS" or found.minimum_os is None:
        out.append(f"is for {found.platform or 'a platform that it does not name'}")
    elif version_key(found.minimum_os) > version_key(MACOS_FLOOR):
        out.append(f"needs macOS {found.minimum_os}; expected {MACOS_FLOOR} at most")
    out += [] if found.is_signed else ["is not signed; a Mac with an Arm CPU refuses it"]
    return out + _export_problems(tuple(name for name in found.exports if not _ZIG_EXPORTS.fullmatch(name)))


def _export_problems(exports: tuple[str, ...]) -> list[str]:
    if exports == EXPORTS:
        return []
    return [f"exports {', '.join(exports) or 'nothing'}; expected {', '.join(EXPORTS)}"]


def tier_problems(cpu: str, best: str, tiers: tuple[str, ...], verdicts: Mapping[str, str]) -> list[str]:
    """What is not as it should be on a CPU whose best tier is `best`; `verdicts`: what check_tiers printed, by tier."""
    out = [] if tuple(verdicts) == tiers else [f"{cpu}: the tiers are {', '.join(verdicts)}, not {', '.join(tiers)}"]
    able = tiers[: tiers.index(best) + 1]
    for tier, verdict in verdicts.items():
        expected = "as scalar" if tier in able else "absent, refused"
        if verdict != expected:
            out.append(f"{cpu}: {tier} is {verdict!r}, expected {expected!r}")
    return out
