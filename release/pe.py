"""Reads what matters for shipping from a 64-bit PE file (a Windows program or DLL)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .errors import GateError

MACHINES = {0x8664: "x86_64", 0xAA64: "arm64"}
_PE32_PLUS = 0x20B


@dataclass(frozen=True, slots=True)
class PeFile:
    machine: str  # a name of MACHINES, or the number
    imports: tuple[str, ...]  # DLL names, lower case
    exports: tuple[str, ...]
    timestamp: int  # of the linker; 0 in a reproducible build


def is_pe(data: bytes) -> bool:
    return data[:2] == b"MZ"


def parse_pe(data: bytes) -> PeFile:
    """Parse a whole file; GateError if it is damaged or not 64-bit."""
    try:
        return _Reader(data).parse()
    except (struct.error, IndexError, ValueError) as error:
        raise GateError(f"damaged PE file: {error}") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        start = struct.unpack_from("<I", data, 60)[0]
        if not is_pe(data) or data[start : start + 4] != b"PE\0\0":
            raise ValueError("no PE header")
        machine, num_sections, self.timestamp, _, _, size = struct.unpack_from("<HHIIIH", data, start + 4)
        self.machine = MACHINES.get(machine, hex(machine))
        optional = start + 24
        if struct.unpack_from("<H", data, optional)[0] != _PE32_PLUS:
            raise ValueError("not 64-bit")
        # (address, size) of the export and the import table
        self.tables = [struct.unpack_from("<II", data, optional + 112 + 8 * index) for index in range(2)]
        table = optional + size
        # (virtual size, address, size in the file, offset in the file)
        self.sections = [struct.unpack_from("<IIII", data, table + 40 * index + 8) for index in range(num_sections)]

    def parse(self) -> PeFile:
        return PeFile(self.machine, tuple(sorted(self._imports())), tuple(sorted(self._exports())), self.timestamp)

    def _offset(self, address: int) -> int:
        for virtual_size, start, size, offset in self.sections:
            if start <= address < start + max(virtual_size, size):
                return int(offset + address - start)
        raise ValueError(f"address {address:#x} is in no section")

    def _string(self, address: int) -> str:
        offset = self._offset(address)
        return self.data[offset : self.data.index(b"\0", offset)].decode("ascii")

    def _imports(self) -> set[str]:
        address, _ = self.tables[1]
        names: set[str] = set()
        offset = self._offset(address) if address else 0
        while address:
            name = struct.unpack_from("<I", self.data, offset + 12)[0]
            if name == 0:
                break
            names.add(self._string(name).lower())
            offset += 20
        return names

    def _exports(self) -> set[str]:
        address, _ = self.tables[0]
        if not address:
            return set()
        count, names = struct.unpack_from("<I4xI", self.data, self._offset(address) + 24)
        table = self._offset(names) if count else 0
        return {self._string(struct.unpack_from("<I", self.data, table + 4 * index)[0]) for index in range(count)}
