"""Reads what matters for shipping from a 64-bit Mach-O file (a macOS program or dylib) of one architecture."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .errors import GateError

MACHINES = {0x0100000C: "arm64", 0x01000007: "x86_64"}
FILE_TYPES = {2: "program", 6: "dylib", 8: "bundle"}
PLATFORMS = {1: "macOS"}
_MAGIC = 0xFEEDFACF
_FAT_MAGICS = (b"\xca\xfe\xba\xbe", b"\xca\xfe\xba\xbf")
_MUST_KNOW = 0x80000000  # set in commands that dyld refuses to skip
_ID_DYLIB, _RPATH = 0xD, 0x1C | _MUST_KNOW
# Loaded at once, weakly, re-exported, lazily, upward.
_LOADED_DYLIBS = (0xC, 0x18 | _MUST_KNOW, 0x1F | _MUST_KNOW, 0x20, 0x23 | _MUST_KNOW)
_VERSION_MIN_MACOS, _BUILD_VERSION, _CODE_SIGNATURE = 0x24, 0x32, 0x1D
_DYLD_INFO, _DYLD_INFO_ONLY, _EXPORTS_TRIE = 0x22, 0x22 | _MUST_KNOW, 0x33 | _MUST_KNOW


@dataclass(frozen=True, slots=True)
class MachOFile:
    machine: str  # a name of MACHINES, or the number
    file_type: str  # a name of FILE_TYPES, or the number
    needed: tuple[str, ...]  # install names of the dylibs it loads, in their order
    install_name: str | None  # what programs that link to it look for
    rpath: tuple[str, ...]  # LC_RPATH
    platform: str | None  # a name of PLATFORMS, or the number; None = it does not say
    minimum_os: str | None  # of that platform, like "11.0"
    exports: tuple[str, ...]  # as C names, without the leading underscore
    is_signed: bool  # carries a signature, if only its own digest's; no Mac with an Arm CPU runs code without one


def parse_macho(data: bytes) -> MachOFile:
    """Parse a whole file; GateError if it is damaged, not 64-bit little-endian, or of several architectures."""
    if data[:4] in _FAT_MAGICS:
        raise GateError("a Mach-O file of several architectures; an archive holds files of one")
    try:
        return _Reader(data).parse()
    except (struct.error, IndexError, ValueError) as error:
        raise GateError(f"damaged Mach-O file: {error}") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        magic, self.machine, _, self.file_type, num_commands, size = struct.unpack_from("<IIIIII", data)
        if magic != _MAGIC:
            raise ValueError("not 64-bit little-endian")
        self.commands: list[tuple[int, bytes]] = []  # (kind, the command with its head)
        offset, end = 32, 32 + size
        for _ in range(num_commands):
            kind, length = struct.unpack_from("<II", data, offset)
            if length < 8 or offset + length > min(end, len(data)):
                raise ValueError("a load command reaches beyond the table")
            self.commands.append((kind, data[offset : offset + length]))
            offset += length

    def parse(self) -> MachOFile:
        platform, minimum_os = self._system()
        return MachOFile(
            machine=MACHINES.get(self.machine, hex(self.machine)),
            file_type=FILE_TYPES.get(self.file_type, str(self.file_type)),
            needed=tuple(self._strings(*_LOADED_DYLIBS)),
            install_name=next(iter(self._strings(_ID_DYLIB)), None),
            rpath=tuple(self._strings(_RPATH)),
            platform=platform,
            minimum_os=minimum_os,
            exports=tuple(sorted(name.removeprefix("_") for name in self._exports())),
            is_signed=any(kind == _CODE_SIGNATURE for kind, _ in self.commands),
        )

    def _strings(self, *kinds: int) -> list[str]:
        """The string of each command of these kinds: its first field says where in the command it begins."""
        out = []
        for kind, command in self.commands:
            if kind in kinds:
                (start,) = struct.unpack_from("<I", command, 8)
                out.append(command[start : command.index(b"\0", start)].decode("utf-8", "replace"))
        return out

    def _system(self) -> tuple[str | None, str | None]:
        for kind, command in self.commands:
            if kind == _BUILD_VERSION:
                platform, version = struct.unpack_from("<II", command, 8)
                return PLATFORMS.get(platform, str(platform)), _version(version)
            if kind == _VERSION_MIN_MACOS:
                return "macOS", _version(struct.unpack_from("<I", command, 8)[0])
        return None, None

    def _exports(self) -> list[str]:
        for kind, command in self.commands:
            if kind in (_DYLD_INFO, _DYLD_INFO_ONLY):
                offset, size = struct.unpack_from("<II", command, 40)
            elif kind == _EXPORTS_TRIE:
                offset, size = struct.unpack_from("<II", command, 8)
            else:
                continue
            if size:
                return _trie_names(self.data[offset : offset + size])
        return []


def _version(number: int) -> str:
    parts = [number >> 16, number >> 8 & 0xFF, number & 0xFF]
    return ".".join(str(part) for part in (parts if parts[2] else parts[:2]))


def _trie_names(trie: bytes) -> list[str]:
    """The names in an export trie: a node is its payload's size, the payload, and edges of text and a node's offset."""
    names = []
    waiting = [(0, b"")]
    visited = set()
    while waiting:
        node, prefix = waiting.pop()
        if node in visited:
            raise ValueError("the export trie has a cycle")
        visited.add(node)
        size, offset = _uleb128(trie, node)
        if size:
            names.append(prefix.decode("utf-8", "replace"))
        offset += size
        num_edges = trie[offset]
        offset += 1
        for _ in range(num_edges):
            end = trie.index(b"\0", offset)
            child, following = _uleb128(trie, end + 1)
            waiting.append((child, prefix + trie[offset:end]))
            offset = following
    return names


def _uleb128(data: bytes, offset: int) -> tuple[int, int]:
    """(the number that begins there, where the next thing begins)."""
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if not byte & 0x80:
            return value, offset
