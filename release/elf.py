"""Reads what matters for shipping from a 64-bit little-endian ELF file, by its program headers as the loader does."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .architectures import ARCHITECTURES
from .errors import GateError

MACHINES = {entry.elf_machine: entry.name for entry in ARCHITECTURES.values()}
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP, _PT_GNU_STACK = 1, 2, 3, 0x6474E551
_DT_NEEDED, _DT_STRTAB, _DT_SYMTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 6, 14, 15, 29
_DT_GNU_HASH = 0x6FFFFEF5
_DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF


@dataclass(frozen=True, slots=True)
class ElfFile:
    machine: str  # a name of MACHINES, or the number
    needed: tuple[str, ...]  # DT_NEEDED
    soname: str | None
    rpath: tuple[str, ...]  # DT_RPATH and DT_RUNPATH, split at ":"
    versions: tuple[str, ...]  # symbol versions it needs, like GLIBC_2.17
    exports: tuple[str, ...]  # symbols that others find by its DT_GNU_HASH, sorted; without such a table none
    interpreter: str | None
    executable_stack: bool
    misaligned: bool  # a loadable segment that the loader refuses


def is_elf(data: bytes) -> bool:
    return data[:4] == b"\x7fELF"


def parse_elf(data: bytes) -> ElfFile:
    """Parse a whole file; GateError if it is damaged or not 64-bit little-endian."""
    try:
        return _Reader(data).parse()
    except (struct.error, IndexError, ValueError) as error:
        raise GateError(f"damaged ELF file: {error}") from error


def max_version(versions: tuple[str, ...], prefix: str) -> str | None:
    """The highest number among `prefix`_N.N...; None if there is none. Names like GLIBC_PRIVATE do not count."""
    numbers = [name.removeprefix(f"{prefix}_") for name in versions if name.startswith(f"{prefix}_")]
    return max((number for number in numbers if number[:1].isdigit()), key=version_key, default=None)


def version_key(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split("."))


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        if not is_elf(data) or data[4] != 2 or data[5] != 1:
            raise ValueError("not 64-bit little-endian")
        self.machine = struct.unpack_from("<H", data, 18)[0]
        offset, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
        # (type, flags, offset, vaddr, paddr, filesz, memsz, align)
        self.headers = [struct.unpack_from("<IIQQQQQQ", data, offset + index * size) for index in range(count)]

    def parse(self) -> ElfFile:
        tags = self._dynamic()
        strings = self._offset(dict(tags)[_DT_STRTAB]) if tags else 0
        named: dict[int, list[str]] = {tag: [] for tag in (_DT_NEEDED, _DT_SONAME, _DT_RPATH, _DT_RUNPATH)}
        for tag, value in tags:
            if tag in named:
                named[tag].append(self._string(strings + value))
        paths = [*named[_DT_RPATH], *named[_DT_RUNPATH]]
        interpreters = [header for header in self.headers if header[0] == _PT_INTERP]
        return ElfFile(
            machine=MACHINES.get(self.machine, str(self.machine)),
            needed=tuple(named[_DT_NEEDED]),
            soname=next(iter(named[_DT_SONAME]), None),
            rpath=tuple(part for path in paths for part in path.split(":") if part),
            versions=tuple(sorted(set(self._versions(dict(tags), strings)))),
            exports=tuple(sorted(self._exports(dict(tags), strings))),
            interpreter=self._string(interpreters[0][2]) if interpreters else None,
            executable_stack=any(header[0] == _PT_GNU_STACK and header[1] & 1 for header in self.headers),
            misaligned=any(self._is_misaligned(header) for header in self.headers if header[0] == _PT_LOAD),
        )

    @staticmethod
    def _is_misaligned(header: tuple[int, ...]) -> bool:
        page = 4096
        return header[2] % page != header[3] % page

    def _dynamic(self) -> list[tuple[int, int]]:
        tags = []
        for kind, _, offset, _, _, size, _, _ in self.headers:
            if kind == _PT_DYNAMIC:
                pairs = struct.iter_unpack("<qQ", self.data[offset : offset + size - size % 16])
                for tag, value in pairs:
                    if tag == 0:
                        break
                    tags.append((tag, value))
        return tags

    def _offset(self, address: int) -> int:
        for kind, _, offset, vaddr, _, size, _, _ in self.headers:
            if kind == _PT_LOAD and vaddr <= address < vaddr + size:
                return int(offset + address - vaddr)
        raise ValueError(f"address {address:#x} is in no segment")

    def _string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode("utf-8", "replace")

    def _versions(self, tags: dict[int, int], strings: int) -> list[str]:
        if _DT_VERNEED not in tags:
            return []
        out = []
        offset = self._offset(tags[_DT_VERNEED])
        for _ in range(tags[_DT_VERNEEDNUM]):
            _, count, _, first, following = struct.unpack_from("<HHIII", self.data, offset)
            entry = offset + first
            for _ in range(count):
                _, _, _, name, next_entry = struct.unpack_from("<IHHII", self.data, entry)
                out.append(self._string(strings + name))
                entry += next_entry
            offset += following
        return out

    def _exports(self, tags: dict[int, int], strings: int) -> list[str]:
        """The symbols of the hash table: from the first of the lowest bucket to the end of the highest one's chain."""
        if _DT_GNU_HASH not in tags:
            return []
        table, symbols = self._offset(tags[_DT_GNU_HASH]), self._offset(tags[_DT_SYMTAB])
        num_buckets, first, bloom_words, _ = struct.unpack_from("<IIII", self.data, table)
        buckets = table + 16 + 8 * bloom_words
        last = max(struct.unpack_from(f"<{num_buckets}I", self.data, buckets), default=0)
        if last < first:
            return []
        chain = buckets + 4 * num_buckets
        while not struct.unpack_from("<I", self.data, chain + 4 * (last - first))[0] & 1:
            last += 1
        names = (struct.unpack_from("<I", self.data, symbols + 24 * index)[0] for index in range(first, last + 1))
        return [self._string(strings + name) for name in names]
