"""CPU tiers of the op library: what each needs, and which of its instructions belong to it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from .errors import GateError

KERNELS = ("matmul", "paged_attention", "rms_norm", "sample")
LIBRARY = "lib/trivet/backends/cpu/libtrivet_cpu.so"
# Tier -> (CPU features, what the operating system must save on a context switch).
_TIERS: dict[str, tuple[tuple[str, ...], str]] = {
    "scalar": ((), "none beyond the ABI"),
    "baseline": (("sse2",), "none beyond the ABI"),
    "avx2": (("sse2", "avx2", "fma", "f16c"), "XCR0: SSE, AVX"),
    "avx512_vnni": (
        ("sse2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
        "XCR0: SSE, AVX, opmask, ZMM",
    ),
    "neon": (("asimd",), "none beyond the ABI"),
    "dotprod": (("asimd", "asimddp"), "none beyond the ABI"),
    "i8mm": (("asimd", "asimddp", "i8mm"), "none beyond the ABI"),
}
# Tier -> what its own instructions look like in a disassembly; scalar and baseline have none of their own.
_MARKS = {"avx2": re.compile(r"%ymm\d"), "avx512_vnni": re.compile(r"%zmm\d")}
_LINE = re.compile(r"^\s*([0-9a-f]+):\s+((?:[0-9a-f]{2} )+)\s*(.*)$")
_UD2 = b"\x0f\x0b"  # an instruction that always ends in SIGILL


def tier_facts(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """What the manifest says about these tiers before anything ran."""
    return [
        {
            "name": name,
            "cpu_features": list(_TIERS[name][0]),
            "os_state": _TIERS[name][1],
            "kernels": list(KERNELS),
            "detected": None,
            "selected": None,
        }
        for name in names
    ]


def required_features(tier: str) -> tuple[str, ...]:
    return _TIERS[tier][0]


def instructions(library: Path, tier: str) -> list[int]:
    """File offsets of the instructions that only `tier` (and higher ones) may execute; GateError without objdump."""
    try:
        done = subprocess.run(
            ["objdump", "-d", "-w", str(library)], capture_output=True, text=True, check=True, timeout=300
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise GateError(f"objdump of {library.name} failed: {error}") from error
    mark = _MARKS[tier]
    found = [match for line in done.stdout.splitlines() if (match := _LINE.match(line)) and mark.search(match[3])]
    return [_file_offset(library, int(match[1], 16)) for match in found]


def poison(library: Path, offsets: list[int]) -> None:
    """Overwrite these instructions: a program that executes one of them dies with SIGILL. Shows what really runs."""
    data = bytearray(library.read_bytes())
    for offset in offsets:
        data[offset : offset + 2] = _UD2
    library.write_bytes(data)


def _file_offset(library: Path, address: int) -> int:
    import struct

    data = _head(library)
    start, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    for index in range(count):
        kind, _, offset, vaddr, _, length, _, _ = struct.unpack_from("<IIQQQQQQ", data, start + index * size)
        if kind == 1 and vaddr <= address < vaddr + length:
            return int(offset + address - vaddr)
    raise GateError(f"{library.name}: address {address:#x} is in no segment")


def _head(library: Path) -> bytes:
    with library.open("rb") as file:
        return file.read(4096)
