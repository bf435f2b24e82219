"""The safetensors reader: single files, shards, hub caches, and what it refuses with which message."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_writers import write_safetensors_file
from trivet.exporters.architectures import build_model
from trivet.exporters.checkpoint import open_checkpoint, weight_paths
from trivet.exporters.dequantize import read_tensor
from trivet.exporters.errors import CheckpointError, ConfigError, ExportError, UnsupportedError

INDEX = "model.safetensors.index.json"


def file_bytes(header: dict[str, Any] | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


TWICE = '{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"the file is empty"),
    "seven bytes": (bytes(7), r"truncated: 7 bytes, the header length alone takes 8"),
    "absurd header": (file_bytes({}, b"", 1 << 60), rf"a header of {1 << 60} bytes is announced"),
    "header beyond the end": (file_bytes({}, b"", 100), r"a header of 100 bytes is announced, the file has 2 after"),
    "no JSON": (file_bytes("{oops"), r"header: not valid JSON"),
    "a list": (file_bytes("[1]"), r"header: expected a JSON object, found list"),
    "nested too deeply": (file_bytes("[" * 100_000), r"header: the JSON is nested too deeply"),
    "not UTF-8": (file_bytes(b"\xff\xff"), r"header: not valid JSON"),
    "duplicate key": (file_bytes(TWICE, bytes(4)), r"the key 'a' occurs twice"),
    "entry without shape": (file_bytes({"a": {"dtype": "F32"}}), r"tensor 'a': the header entry must have exactly"),
    "negative extent": (file_bytes({"a": entry(0, 4, [-1])}, bytes(4)), r"tensor 'a': shape is \[-1\]"),
    "extent of text": (file_bytes({"a": entry(0, 4, ["1"])}, bytes(4)), r"tensor 'a': shape is \['1'\]"),
    "odd offsets": (file_bytes({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}), r"data_offsets is \[0\]"),
    "unknown dtype": (file_bytes({"a": entry(0, 4, dtype="Q9")}, bytes(4)), r"tensor 'a': dtype is 'Q9', expected one"),
    "size mismatch": (file_bytes({"a": entry(0, 8, [3])}, bytes(8)), r"span 8 bytes, F32 \[3\] needs 12"),
    "outside": (file_bytes({"a": entry(0, 400)}, bytes(8)), r"truncated: .*tensor 'a' ends at byte \d+, the file has"),
    "overlap": (
        file_bytes({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        r"tensor 'b' overlaps the tensor before it",
    ),
    "gap": (file_bytes({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), r"tensor 'b' leaves a gap before it"),
    "bytes left over": (file_bytes({"a": entry(0, 4)}, bytes(9)), r"the tensors end at byte \d+, the file has"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    data, message = BAD_FILES[case]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["safetensors", "safetensors-sharded"])
def test_agrees_with_the_safetensors_package(kind: str, tiny: Callable[[str, str], Path]) -> None:
    directory = tiny("llama", kind)
    theirs = {n: a for f in sorted(directory.glob("*.safetensors")) for n, a in load_file(f).items()}
    with open_checkpoint(directory) as checkpoint:
        assert set(checkpoint.tensors) == set(theirs)
        for name, values in theirs.items():
            assert np.array_equal(read_tensor(checkpoint.tensors[name]), values)


def copy(directory: Path, target: Path) -> Path:
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.fixture
def sharded(tiny: Callable[[str, str], Path], tmp_path: Path) -> Path:
    return copy(tiny("llama", "safetensors-sharded"), tmp_path / "sharded")


@pytest.fixture
def single(tiny: Callable[[str, str], Path], tmp_path: Path) -> Path:
    return copy(tiny("llama", "safetensors"), tmp_path / "single")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"shard {shard.name} is missing \(\d+ tensors"):
        weight_paths(sharded)


def test_the_index_decides_which_shard_a_tensor_comes_from(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    name, shard = next(iter(weight_map.items()))
    other = next(s for s in weight_map.values() if s != shard)
    edit(sharded / INDEX, weight_map=weight_map | {name: other})
    with pytest.raises(CheckpointError, match=rf"says that tensor '{name}' is in {other}, but it is not"):
        open_checkpoint(sharded)
    del weight_map[name]
    edit(sharded / INDEX, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' of {shard} is not in the weight_map"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("shard", ["../escape.safetensors", "/etc/passwd", "", "..", 3])
def test_an_index_cannot_point_elsewhere(shard: object, sharded: Path) -> None:
    edit(sharded / INDEX, weight_map={"a": shard})
    with pytest.raises(CheckpointError, match=r"weight_map\['a'\] is .*, expected the name of a file beside it"):
        open_checkpoint(sharded)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .*found config.json, pytorch_model.bin"):
        open_checkpoint(tmp_path)


def test_no_config(single: Path) -> None:
    (single / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        open_checkpoint(single)


def test_no_such_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such checkpoint; expected a \.gguf file or a directory"):
        open_checkpoint(tmp_path / "absent")


def rewrite(directory: Path, changes: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of model.safetensors and leave the data alone."""
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    changes(header)
    path.write_bytes(file_bytes(header, raw[8 + length :]))


def test_missing_misshapen_and_unknown_tensors_are_named(single: Path) -> None:
    norm = "model.layers.1.input_layernorm.weight"
    rewrite(single, lambda header: header.update({"extra.weight": header.pop(norm)}))
    with open_checkpoint(single) as checkpoint, pytest.raises(CheckpointError, match=rf"'{norm}' is missing, expected"):
        build_model(checkpoint)
    rewrite(single, lambda header: header.update({norm: header.pop("extra.weight") | {"shape": [8, 8]}}))
    with (
        open_checkpoint(single) as checkpoint,
        pytest.raises(CheckpointError, match=rf"'{norm}' has the shape \[8, 8\], expected \[64\]"),
    ):
        build_model(checkpoint)
    rewrite(single, lambda header: header[norm].update(shape=[64]))
    with open_checkpoint(single) as checkpoint:
        build_model(checkpoint)

    def add(header: dict[str, Any]) -> None:
        last = max(e["data_offsets"][1] for n, e in header.items() if n != "__metadata__")
        header["model.layers.0.self_attn.sinks"] = entry(last, last + 16)

    rewrite(single, add)
    with (single / "model.safetensors").open("ab") as file:
        file.write(bytes(16))
    with (
        open_checkpoint(single) as checkpoint,
        pytest.raises(UnsupportedError, match=r"tensor 'model.layers.0.self_attn.sinks' \[4\] has no place in this"),
    ):
        build_model(checkpoint)


def test_unsupported_dtypes_are_named_with_their_tensor(single: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {n: ("F32", a.shape, a.tobytes()) for n, a in load_file(single / "model.safetensors").items()}
    tensors[name] = ("F8_E4M3", (96, 64), bytes(96 * 64))
    write_safetensors_file(single / "model.safetensors", tensors)
    message = rf"tensor '{name}' has the type F8_E4M3; supported are F32, F16"
    with open_checkpoint(single) as checkpoint, pytest.raises(UnsupportedError, match=message):
        build_model(checkpoint)


def hub_cache(directory: Path, root: Path) -> Path:
    """The layout of a hub cache: snapshots full of links to blobs named by their hash."""
    repo = root / "models--org--Tiny-1B"
    snapshot, blobs = repo / "snapshots" / "abc123", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(directory.iterdir())):
        blob = blobs / f"{index:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


@pytest.mark.parametrize("kind", ["safetensors", "safetensors-sharded"])
def test_hub_cache_links_lead_to_the_blobs(kind: str, tiny: Callable[[str, str], Path], tmp_path: Path) -> None:
    snapshot = hub_cache(tiny("llama", kind), tmp_path)
    with open_checkpoint(snapshot) as checkpoint:
        model = build_model(checkpoint)
        assert checkpoint.name == "Tiny-1B"
        assert checkpoint.directory == snapshot
        assert checkpoint.source_dir == (tmp_path / "models--org--Tiny-1B" / "blobs").resolve()
        for tensor in model.tensors.values():
            assert tensor.file.path.parent == checkpoint.source_dir
            assert len(tensor.file.path.name) == 40


def test_shards_in_two_directories_are_refused(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    shard = sorted(sharded.glob("*.safetensors"))[0]
    moved = shard.rename(tmp_path / "elsewhere" / shard.name)
    shard.symlink_to(moved)
    with pytest.raises(CheckpointError, match="the weight files lie in 2 directories"):
        open_checkpoint(sharded)


@pytest.mark.timeout(120)
def test_flipped_header_bytes_end_in_an_export_error_or_a_model(single: Path) -> None:
    path = single / "model.safetensors"
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    dice = random.Random(6)
    refused = 0
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(header)] = dice.choice((0, 34, 44, 48, 57, 91, 123, 125, 255, dice.randrange(256)))
        path.write_bytes(damaged)
        try:
            with open_checkpoint(single) as checkpoint:
                build_model(checkpoint)
        except ExportError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 300
