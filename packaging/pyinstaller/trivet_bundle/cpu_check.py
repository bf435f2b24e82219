"""Whether this CPU can run the numpy of the bundle. Without the check a too old CPU ends in SIGILL, without a word."""

from __future__ import annotations

import ctypes
import json
import platform
from pathlib import Path

# x86-64-v2, what numpy's wheels are compiled for: name -> (name in /proc/cpuinfo, register of CPUID leaf 1, bit).
_EDX, _ECX = 3, 2
_X86_64_V2 = {
    "SSE3": ("pni", _ECX, 0),
    "SSSE3": ("ssse3", _ECX, 9),
    "CMPXCHG16B": ("cx16", _ECX, 13),
    "SSE4.1": ("sse4_1", _ECX, 19),
    "SSE4.2": ("sse4_2", _ECX, 20),
    "POPCNT": ("popcnt", _ECX, 23),
}


class _CpuidFeature(ctypes.Structure):
    _fields_ = [("cpuid_array", ctypes.c_uint32 * 4), ("active_array", ctypes.c_uint32 * 4)]


def missing_cpu_features(bundle: Path) -> list[str]:
    """Features of x86-64-v2 that this CPU lacks although `bundle` needs them; empty where nothing can be learnt."""
    if not _needs_x86_64_v2(bundle):
        return []
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    registers = _cpuid_leaf_1()
    if registers is not None:
        return [name for name, (_, register, bit) in _X86_64_V2.items() if not registers[register] >> bit & 1]
    flags = _cpuinfo_flags()
    return [name for name, (flag, _, _) in _X86_64_V2.items() if flags and flag not in flags]


def _needs_x86_64_v2(bundle: Path) -> bool:
    """What the manifest says; without one, yes, as numpy's wheels do."""
    try:
        manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
        return bool(manifest["target"]["cpu_baseline"] == "x86-64-v2")
    except (OSError, ValueError, KeyError):
        return True


def _cpuid_leaf_1() -> list[int] | None:
    """EAX, EBX, ECX, EDX of CPUID leaf 1 as glibc 2.33 and newer report them; None from an older one."""
    try:
        leaf = ctypes.CDLL(None)["__x86_get_cpuid_feature_leaf"]
    except (AttributeError, OSError):
        return None
    leaf.argtypes = [ctypes.c_uint]
    leaf.restype = ctypes.POINTER(_CpuidFeature)
    return list(leaf(0).contents.cpuid_array)  # index 0 is CPUID_INDEX_1


def _cpuinfo_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
