"""CPU tiers of the op library: what each needs, and which of its instructions belong to it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from .architectures import Architecture, architecture_of
from .errors import GateError

LIBRARY = "lib/trivet/backends/cpu/libtrivet_cpu.so"
# Address, bytes (or words of four), instruction.
_LINE = re.compile(r"^\s*([0-9a-f]+):\s+((?:[0-9a-f]{2} )+|[0-9a-f]{8} )\s*(.*)$")


def tier_facts(arch: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """What the manifest says about these tiers of `arch` before anything ran."""
    tiers = architecture_of(arch).tiers
    return [
        {
            "name": name,
            "cpu_features": list(tiers[name].features),
            "os_state": tiers[name].os_state,
            "kernels": list(tiers[name].kernels),
            "detected": None,
            "selected": None,
        }
        for name in names
    ]


def instructions(library: Path, architecture: Architecture, tier: str) -> list[int]:
    """File offsets of the instructions that only `tier` (and higher ones) may execute; GateError without objdump."""
    mark = architecture.tiers[tier].mark
    if mark is None:
        return []
    try:
        command = [architecture.tool("objdump"), "-d", "-w", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        raise GateError(f"objdump of {library.name} failed: {error}") from error
    found = [match for line in done.stdout.splitlines() if (match := _LINE.match(line)) and mark.search(match[3])]
    return [_file_offset(library, int(match[1], 16)) for match in found]


def poison(library: Path, offsets: list[int], illegal: bytes) -> None:
    """Overwrite these instructions: a program that executes one of them dies with SIGILL. Shows what really runs."""
    data = bytearray(library.read_bytes())
    for offset in offsets:
        data[offset : offset + len(illegal)] = illegal
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
