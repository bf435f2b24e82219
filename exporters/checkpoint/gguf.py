"""GGUF reader (versions 2 and 3, little endian, split files).

Every count, length and offset is compared with what the file can hold before anything is allocated for it.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...backends.contract.formats import FORMATS
from ..errors import CheckpointError, UnsupportedError
from .tensors import Checkpoint, MappedFile, TensorInfo, check_one_directory

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
MAX_ALIGNMENT: Final = 1 << 20
MAX_NAME_BYTES: Final = 65535  # of a key; the specification's own limit
MAX_TENSOR_NAME_BYTES: Final = 255
MAX_DIMS: Final = 4
MAX_ARRAY_DEPTH: Final = 2
MAX_ARRAY_ELEMENTS: Final = 1 << 23  # all arrays of a file together; a vocabulary of 262,144 has about a million
MAX_INNER_ARRAYS: Final = 1 << 16  # of an array of arrays
MAX_METADATA_BYTES: Final = 1 << 28

_SCALARS: Final[dict[int, str]] = {  # value type id -> struct code
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING: Final = 8
_ARRAY: Final = 9
_BY_GGML_TYPE: Final = {f.ggml_type: f for f in FORMATS.values()}
_OTHER_GGML_TYPES: Final[dict[int, str]] = {  # known by name only, for the message
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
_SPLIT_NAME: Final = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


class _Cursor:
    """Reads little-endian values from a map; a read past the end is a CheckpointError that says where."""

    def __init__(self, file: MappedFile) -> None:
        self.map = file.map
        self.size = file.size
        self.path = file.path
        self.pos = 0
        self.array_elements = 0

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def need(self, nbytes: int, what: str) -> None:
        left = self.size - self.pos
        if nbytes > left:
            raise self.fail(f"truncated: {what} needs {nbytes} bytes at offset {self.pos}, the file has {left} left")

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        value = struct.unpack_from("<" + code, self.map, self.pos)[0]
        self.pos += size
        return value

    def text(self, what: str, limit: int) -> str:
        length: int = self.scalar("Q", f"the length of {what}")
        if length > limit:
            raise self.fail(f"{what} has a length of {length} bytes, the limit is {limit}")
        self.need(length, what)
        raw = self.map[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8 (byte {error.start})") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what, MAX_METADATA_BYTES)
        if kind != _ARRAY:
            raise self.fail(f"{what} has the unknown value type {kind}, expected 0 to 12")
        return self._array(what, depth)

    def _array(self, what: str, depth: int) -> list[Any]:
        if depth >= MAX_ARRAY_DEPTH:
            raise self.fail(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        kind: int = self.scalar("I", f"the element type of {what}")
        count: int = self.scalar("Q", f"the element count of {what}")
        self.array_elements += count
        if self.array_elements > MAX_ARRAY_ELEMENTS:
            raise self.fail(f"{what} has {count} elements; the limit for a file is {MAX_ARRAY_ELEMENTS}")
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind]}"
            self.need(struct.calcsize(layout), f"{what} ({count} elements)")
            values = list(struct.unpack_from(layout, self.map, self.pos))
            self.pos += struct.calcsize(layout)
            return values
        if kind == _STRING:
            return self._strings(count, what)
        if count > MAX_INNER_ARRAYS:
            raise self.fail(f"{what} holds {count} arrays, the limit is {MAX_INNER_ARRAYS}")
        self.need(12 * count, f"{what} ({count} elements)")  # the least that an array takes
        return [self.value(kind, what, depth + 1) for _ in range(count)]

    def _strings(self, count: int, what: str) -> list[str]:
        self.need(8 * count, f"{what} ({count} strings)")
        read_length, buffer, pos, size = struct.Struct("<Q").unpack_from, self.map, self.pos, self.size
        strings: list[str] = []
        for index in range(count):
            start = pos + 8
            if start <= size:
                pos = start + read_length(buffer, pos)[0]
            if start > size or pos > size:
                raise self.fail(f"truncated: string {index} of {count} of {what} ends beyond the file ({size} bytes)")
            try:
                strings.append(buffer[start:pos].decode())
            except UnicodeDecodeError:
                raise self.fail(f"string {index} of {what} is not valid UTF-8") from None
        self.pos = pos
        return strings


@dataclass(frozen=True, slots=True)
class _Part:
    """One GGUF file: the whole checkpoint, or a part of a split one."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return (tensor count, key-value count)."""
    cursor.need(4, "the magic")
    magic = cursor.map[:4]
    if magic != MAGIC:
        raise cursor.fail(f"not a GGUF file: it begins with {magic!r}, expected {MAGIC!r}")
    cursor.pos = 4
    version: int = cursor.scalar("I", "the version")
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(f"{cursor.path}: a big-endian GGUF file; only little-endian files can be read")
    if version not in (2, 3):
        raise UnsupportedError(f"{cursor.path}: GGUF version {version}, expected 2 or 3; convert the model again")
    num_tensors: int = cursor.scalar("Q", "the tensor count")
    num_pairs: int = cursor.scalar("Q", "the key-value count")
    left = cursor.size - cursor.pos
    # the least that an entry takes: name length, dims, one extent, type, offset; key length, type, one byte
    if num_tensors * 32 > left:
        raise cursor.fail(f"a tensor count of {num_tensors} cannot fit into the {left} bytes after the header")
    if num_pairs * 13 > left:
        raise cursor.fail(f"a key-value count of {num_pairs} cannot fit into the {left} bytes after the header")
    return num_tensors, num_pairs


def _read_metadata(cursor: _Cursor, num_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    start = cursor.pos
    for index in range(num_pairs):
        key = cursor.text(f"key {index} of {num_pairs}", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.fail(f"the key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I", f"the type of {key!r}"), f"the value of {key!r}")
        if cursor.pos - start > MAX_METADATA_BYTES:
            raise cursor.fail(f"the metadata up to {key!r} is larger than the limit of {MAX_METADATA_BYTES} bytes")
    return metadata


def _read_tensor_entry(cursor: _Cursor, index: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
    """Return (name, row-major shape, ggml type, offset in the data section)."""
    name = cursor.text(f"the name of tensor {index} of {count}", MAX_TENSOR_NAME_BYTES)
    num_dims: int = cursor.scalar("I", f"the dimension count of tensor {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
    extents = [cursor.scalar("Q", f"the shape of tensor {name!r}") for _ in range(num_dims)]
    kind: int = cursor.scalar("I", f"the type of tensor {name!r}")
    offset: int = cursor.scalar("Q", f"the offset of tensor {name!r}")
    if kind not in _BY_GGML_TYPE:
        type_name = _OTHER_GGML_TYPES.get(kind, f"ggml type {kind}")
        raise UnsupportedError(
            f"{cursor.path}: tensor {name!r} has the type {type_name}; supported are "
            f"{', '.join(f.upper() for f in FORMATS)}: use a file quantised to one of these"
        )
    if min(extents) < 1:
        raise cursor.fail(f"tensor {name!r} has the shape {extents}, expected positive extents")
    return name, tuple(reversed(extents)), kind, offset


def _read_part(file: MappedFile) -> _Part:
    cursor = _Cursor(file)
    num_tensors, num_pairs = _read_header(cursor)
    metadata = _read_metadata(cursor, num_pairs)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, expected a power of two up to {MAX_ALIGNMENT}")
    entries = [_read_tensor_entry(cursor, index, num_tensors) for index in range(num_tensors)]
    data_start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise cursor.fail(f"the tensor {name!r} occurs twice")
        weight_format = _BY_GGML_TYPE[kind]
        try:
            nbytes = weight_format.row_bytes(shape[-1])
        except ValueError as error:
            raise cursor.fail(f"tensor {name!r}: {error}") from None
        for extent in shape[:-1]:
            nbytes *= extent
        if offset % alignment:
            raise cursor.fail(f"tensor {name!r} has the offset {offset}, not a multiple of the alignment {alignment}")
        if data_start + offset + nbytes > file.size:
            raise cursor.fail(
                f"truncated: the data of tensor {name!r} ends at byte {data_start + offset + nbytes}, "
                f"the file has {file.size}: fetch it again"
            )
        tensors[name] = TensorInfo(name, shape, weight_format.name, file, data_start + offset, nbytes)
    _refuse_overlap(tensors, cursor.fail)
    return _Part(metadata, tensors)


def _refuse_overlap(tensors: dict[str, TensorInfo], fail: Callable[[str], CheckpointError]) -> None:
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise fail(f"the data of the tensors {before.name!r} and {after.name!r} overlap")


def shard_paths(path: Path) -> list[Path]:
    """Real paths of all parts of the GGUF model that `path` belongs to, first part first."""
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        return [Path(os.path.realpath(path))]
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    if not 1 <= int(match["number"]) <= count:
        raise CheckpointError(f"{path}: part {int(match['number'])} of {count} cannot be: parts count from 1")
    for name in names:
        if not path.with_name(name).is_file():
            raise CheckpointError(f"{path}: part {name} of this split model is missing; put all {count} side by side")
    return [Path(os.path.realpath(path.with_name(name))) for name in names]


def _check_split(parts: list[_Part], files: list[MappedFile]) -> None:
    for index, (part, file) in enumerate(zip(parts, files, strict=True)):
        count = part.metadata.get("split.count", 1 if len(files) == 1 else None)
        number = part.metadata.get("split.no", 0 if len(files) == 1 else None)
        # a lone part keeps its count under any name
        if len(files) == 1 and count not in (0, 1):
            raise CheckpointError(
                f"{file.path}: one part of a model in split.count = {count!r} parts, but not named "
                f"NAME-0000i-of-0000N.gguf: restore the names so that the other parts can be found"
            )
        if len(files) > 1 and (count != len(files) or number != index):
            raise CheckpointError(
                f"{file.path}: split.no = {number!r} and split.count = {count!r}, "
                f"but the file name says part {index} of {len(files)} (counted from 0)"
            )
    expected = parts[0].metadata.get("split.tensors.count")
    found = sum(len(part.tensors) for part in parts)
    if len(files) > 1 and expected is not None and expected != found:
        raise CheckpointError(f"{files[0].path}: split.tensors.count = {expected!r}, the parts hold {found} tensors")


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or all parts of the split model that it belongs to."""
    paths = shard_paths(path)
    check_one_directory(paths)
    files: list[MappedFile] = []
    try:
        for part_path in paths:
            files.append(MappedFile(part_path))
        parts = [_read_part(file) for file in files]
        _check_split(parts, files)
        tensors: dict[str, TensorInfo] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                if name in tensors:
                    raise CheckpointError(f"{tensor.file.path}: the tensor {name!r} is in another part too")
                tensors[name] = tensor
        metadata = parts[0].metadata
        title = metadata.get("general.name")
        name = title if isinstance(title, str) and title else path.stem
        return Checkpoint("gguf", path, path.parent, name, tuple(files), tensors, metadata=metadata)
    except BaseException:
        for file in files:
            file.close()
        raise
