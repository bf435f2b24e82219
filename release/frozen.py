"""Reads the archives that PyInstaller appends to a program: the Python modules inside, decompressed."""

from __future__ import annotations

import io
import marshal
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from .errors import GateError

_COOKIE = struct.Struct("!8sIIII64s")
_MAGIC = b"MEI\014\013\012\013\016"
_ENTRY = struct.Struct("!IIIIBc")


def frozen_modules(program: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, marshalled code or data) of everything inside; GateError if the program holds no such archive."""
    at = program.rfind(_MAGIC)
    if at < 0:
        raise GateError("the program holds no PyInstaller archive")
    _, length, toc_offset, toc_length, _, _ = _COOKIE.unpack_from(program, at)
    start = at + _COOKIE.size - length
    toc = program[start + toc_offset : start + toc_offset + toc_length]
    position = 0
    while position < len(toc):
        size, offset, packed, _, compressed, _ = _ENTRY.unpack_from(toc, position)
        name = toc[position + _ENTRY.size : position + size].rstrip(b"\0").decode()
        data = program[start + offset : start + offset + packed]
        data = zlib.decompress(data) if compressed else data
        if data[:4] == b"PYZ\0":
            yield from _pyz_modules(data)
        else:
            yield name, data
        position += size


def _pyz_modules(pyz: bytes) -> Iterator[tuple[str, bytes]]:
    (toc_offset,) = struct.unpack_from("!I", pyz, 8)
    toc: Any = marshal.loads(pyz[toc_offset:])
    for name, (_, offset, length) in dict(toc).items():
        if length:
            yield name, zlib.decompress(pyz[offset : offset + length])


def zipped_modules(data: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of base_library.zip."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            yield name, archive.read(name)
