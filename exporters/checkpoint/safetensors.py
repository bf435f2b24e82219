"""safetensors reader: a directory with config.json and one file, or shards under an index.

The index's `weight_map` says which shard a tensor comes from. Headers are checked against the file's size.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

from ...backends.contract.formats import FORMATS
from ..errors import CheckpointError, ConfigError
from .tensors import Checkpoint, MappedFile, TensorInfo, check_one_directory

SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
MAX_JSON_BYTES: Final = 64 << 20  # of config.json and the index

_BY_DTYPE: Final = {f.safetensors_dtype: f for f in FORMATS.values() if f.safetensors_dtype}
_OTHER_DTYPE_BYTES: Final[dict[str, int]] = {  # sizes only, so that offsets can be checked
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; CheckpointError on anything else, on duplicate keys and on absurd nesting."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise CheckpointError(f"{where}: the JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{where}: not valid JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; CheckpointError if that fails."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, the limit for this file is {MAX_JSON_BYTES}")
        return parse_json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _weight_map(directory: Path) -> dict[str, str] | None:
    """Tensor name -> shard file name; None without an index."""
    path = directory / INDEX_NAME
    if not path.is_file():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty, expected tensor names and file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard:
            raise CheckpointError(f"{path}: weight_map[{name!r}] is {shard!r}, expected the name of a file beside it")
    return weight_map


def _shards(directory: Path, weight_map: dict[str, str] | None) -> dict[str, Path]:
    """Shard name -> real path, sorted by name; CheckpointError names a missing one."""
    names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]
    for name in names:
        if (directory / name).is_file():
            continue
        if weight_map is not None:
            count = sum(1 for shard in weight_map.values() if shard == name)
            raise CheckpointError(f"{directory}: shard {name} is missing ({count} tensors of {INDEX_NAME} are in it)")
        found = ", ".join(sorted(p.name for p in directory.iterdir())[:10]) or "nothing"
        raise CheckpointError(
            f"{directory}: neither {SINGLE_NAME} nor {INDEX_NAME} is there (found {found}); "
            f"expected a safetensors checkpoint, or give the path of a .gguf file"
        )
    return {name: Path(os.path.realpath(directory / name)) for name in names}


def shard_paths(directory: Path) -> list[Path]:
    """Real paths of the weight files of a checkpoint directory."""
    return list(_shards(directory, _weight_map(directory)).values())


def _is_extent(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _tensor(name: str, entry: object, file: MappedFile, data_start: int) -> TensorInfo:
    where = f"{file.path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: the header entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(_is_extent(extent) for extent in shape):
        raise CheckpointError(f"{where}: shape is {shape!r}, expected a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_extent(offset) for offset in offsets):
        raise CheckpointError(f"{where}: data_offsets is {offsets!r}, expected [begin, end]")
    if not isinstance(dtype, str) or not (dtype in _BY_DTYPE or dtype in _OTHER_DTYPE_BYTES):
        known = ", ".join([*(str(d) for d in _BY_DTYPE), *_OTHER_DTYPE_BYTES])
        raise CheckpointError(f"{where}: dtype is {dtype!r}, expected one of {known}")
    nbytes = _BY_DTYPE[dtype].block_bytes if dtype in _BY_DTYPE else _OTHER_DTYPE_BYTES[dtype]
    for extent in shape:
        nbytes *= extent
    begin, end = offsets
    if end - begin != nbytes:
        raise CheckpointError(f"{where}: data_offsets span {end - begin} bytes, {dtype} {shape} needs {nbytes}")
    if data_start + end > file.size:
        raise CheckpointError(
            f"truncated: {where} ends at byte {data_start + end}, the file has {file.size}: fetch it again"
        )
    format_name = _BY_DTYPE[dtype].name if dtype in _BY_DTYPE else dtype
    return TensorInfo(name, tuple(shape), format_name, file, data_start + begin, nbytes)


def read_tensors(file: MappedFile) -> dict[str, TensorInfo]:
    """The tensor table of one file; CheckpointError unless it describes the file's bytes without gap or overlap."""
    if file.size < 8:
        raise CheckpointError(f"{file.path}: truncated: {file.size} bytes, the header length alone takes 8")
    length = int.from_bytes(file.map[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > file.size:
        raise CheckpointError(
            f"{file.path}: truncated or not a safetensors file: a header of {length} bytes is announced, "
            f"the file has {file.size - 8} after the length, the limit is {MAX_HEADER_BYTES}"
        )
    header = parse_json_object(file.map[8 : 8 + length], f"{file.path}: header")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, file, 8 + length) for name, entry in header.items()}
    position = 8 + length
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            kind = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap before it"
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name!r} {kind}: it begins at byte {tensor.offset}, expected {position}"
            )
        position += tensor.nbytes
    if position != file.size:
        raise CheckpointError(f"{file.path}: the tensors end at byte {position}, the file has {file.size}")
    return tensors


def _merge(
    directory: Path, tables: dict[str, dict[str, TensorInfo]], weight_map: dict[str, str]
) -> dict[str, TensorInfo]:
    """Take each tensor from the shard that the index names."""
    tensors: dict[str, TensorInfo] = {}
    for name, shard in weight_map.items():
        if name not in tables[shard]:
            raise CheckpointError(f"{directory}: {INDEX_NAME} says that tensor {name!r} is in {shard}, but it is not")
        tensors[name] = tables[shard][name]
    for shard, table in tables.items():
        if extra := next((name for name in table if name not in weight_map), None):
            raise CheckpointError(f"{directory}: tensor {extra!r} of {shard} is not in the weight_map of {INDEX_NAME}")
    return tensors


def _model_name(directory: Path, config: dict[str, Any]) -> str:
    """The hub's name of a cached snapshot (models--org--name/snapshots/revision), else the folder's."""
    if cached := re.match(r"^models--(?:.+--)?(.+)$", directory.absolute().parent.parent.name):
        return cached[1]
    return directory.absolute().name or str(config.get("model_type", "model"))


def open_safetensors(directory: Path) -> Checkpoint:
    """Open a checkpoint directory."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory}: config.json is missing; expected a Hugging Face checkpoint directory")
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    weight_map = _weight_map(directory)
    shards = _shards(directory, weight_map)
    check_one_directory(list(shards.values()))
    files: list[MappedFile] = []
    try:
        tables: dict[str, dict[str, TensorInfo]] = {}
        for name, path in shards.items():
            files.append(MappedFile(path))
            tables[name] = read_tensors(files[-1])
        tensors = tables[SINGLE_NAME] if weight_map is None else _merge(directory, tables, weight_map)
    except BaseException:
        for file in files:
            file.close()
        raise
    return Checkpoint(
        "safetensors",
        directory,
        directory,
        _model_name(directory, config),
        tuple(files),
        tensors,
        config=config,
        generation_config=generation_config,
    )
