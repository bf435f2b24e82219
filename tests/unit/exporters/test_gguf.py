"""The GGUF reader: what it reads, and what it refuses with which message."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from trivet.exporters.architectures import build_model
from trivet.exporters.checkpoint import open_checkpoint, weight_paths
from trivet.exporters.dequantize import raw_rows, read_tensor
from trivet.exporters.errors import CheckpointError, ExportError, UnsupportedError


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_bytes(
    pairs: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


ARCHITECTURE = pair("general.architecture", 8, text("llama"))
ONE = [tensor("token_embd.weight", (32, 2))]
DATA = bytes(256)
ALIGNMENT = pair("general.alignment", 4, struct.pack("<I", 24))
HUGE = 1 << 60


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


NESTED = array(9, 1, array(9, 1, array(4, 1, bytes(4))))
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "wrong magic": (file_bytes([], [], DATA, magic=b"PK\x03\x04"), r"not a GGUF file: it begins with b'PK\\x03\\x04'"),
    "empty": (b"", r"the file is empty"),
    "only the magic": (b"GGUF", r"truncated: the version needs 4 bytes at offset 4, the file has 0 left"),
    "half a header": (b"GGUF" + struct.pack("<IQ", 3, 0), r"truncated: the key-value count needs 8 bytes"),
    "version 1": (file_bytes([], [], version=1), r"GGUF version 1, expected 2 or 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"a big-endian GGUF file"),
    "absurd tensor count": (file_bytes([], [], DATA, num_tensors=HUGE), rf"a tensor count of {HUGE} cannot fit"),
    "absurd pair count": (file_bytes([], [], DATA, num_pairs=HUGE), rf"a key-value count of {HUGE} cannot fit"),
    "absurd key length": (
        file_bytes([struct.pack("<Q", HUGE) + bytes(16)], []),
        rf"key 0 of 1 has a length of {HUGE} bytes, the limit is 65535",
    ),
    "absurd string": (
        file_bytes([pair("general.name", 8, struct.pack("<Q", HUGE))], [], DATA),
        r"the value of 'general.name' has a length of",
    ),
    "string beyond the end": (
        file_bytes([pair("general.name", 8, struct.pack("<Q", 5000))], [], DATA),
        r"truncated: the value of 'general.name' needs 5000 bytes",
    ),
    "absurd array": (
        file_bytes([pair("a", 9, array(4, HUGE))], [], DATA),
        rf"the value of 'a' has {HUGE} elements; the limit for a file is 8388608",
    ),
    "array beyond the end": (
        file_bytes([pair("a", 9, array(4, 1 << 20))], [], DATA),
        r"truncated: the value of 'a' \(1048576 elements\) needs 4194304 bytes",
    ),
    "strings beyond the end": (
        file_bytes([pair("a", 9, array(8, 1 << 20))], [], DATA),
        r"truncated: the value of 'a' \(1048576 strings\) needs 8388608 bytes",
    ),
    "too many arrays": (
        file_bytes([pair("a", 9, array(9, 1 << 17))], [], DATA),
        r"the value of 'a' holds 131072 arrays, the limit is 65536",
    ),
    "one string too long": (
        file_bytes([pair("a", 9, array(8, 2, text("x") + struct.pack("<Q", 1 << 40)))], [], DATA),
        r"truncated: string 1 of 2 of the value of 'a' ends beyond the file",
    ),
    "arrays too deep": (file_bytes([pair("a", 9, NESTED)], []), r"the value of 'a' nests arrays deeper than 2"),
    "unknown value type": (file_bytes([pair("a", 13, DATA)], []), r"the value of 'a' has the unknown value type 13"),
    "duplicate key": (file_bytes([ARCHITECTURE] * 2, []), r"the key 'general.architecture' occurs twice"),
    "key not UTF-8": (file_bytes([text(b"\xff\xfe") + bytes(5)], []), r"key 0 of 1 is not valid UTF-8 \(byte 0\)"),
    "alignment": (file_bytes([ALIGNMENT], []), r"general.alignment is 24, expected a power of two"),
    "truncated table": (
        file_bytes([ARCHITECTURE], ONE, DATA)[:80],
        r"truncated: the name of tensor 0 of 1 needs 17 bytes",
    ),
    "no dimensions": (file_bytes([], [tensor("t", ())], DATA), r"tensor 't' has 0 dimensions, expected 1 to 4"),
    "zero extent": (file_bytes([], [tensor("t", (0, 4))], DATA), r"tensor 't' has the shape \[0, 4\]"),
    "broken block": (file_bytes([], [tensor("t", (33, 2), 2)], DATA), r"tensor 't': q4_0: a row of 33 elements is not"),
    "odd offset": (file_bytes([], [tensor("t", (4,), 0, 8)], DATA), r"tensor 't' has the offset 8, not a multiple of"),
    "offset outside": (
        file_bytes([], [tensor("t", (32,), 0, 1 << 40)], DATA),
        r"truncated: the data of tensor 't' ends at byte \d+, the file has",
    ),
    "shape larger than the file": (
        file_bytes([], [tensor("t", (1 << 40, 1 << 40))], DATA),
        r"truncated: the data of tensor 't' ends at byte",
    ),
    "truncated data": (
        file_bytes([ARCHITECTURE], ONE, DATA)[:-1],
        r"truncated: the data of tensor 'token_embd.weight' ends at byte 384, the file has 383: fetch it again",
    ),
    "overlap": (
        file_bytes([], [tensor("a", (32,)), tensor("b", (32,), 0, 96)], DATA),
        r"the data of the tensors 'a' and 'b' overlap",
    ),
    "duplicate tensor": (file_bytes([], [tensor("a", (8,))] * 2, DATA), r"the tensor 'a' occurs twice"),
    "Q2_K": (
        file_bytes([], [tensor("blk.0.ffn_up.weight", (256, 2), 10)], DATA),
        r"tensor 'blk.0.ffn_up.weight' has the type Q2_K; supported are F32, F16, Q4_0",
    ),
    "MXFP4": (file_bytes([], [tensor("t", (256, 2), 39)], DATA), r"tensor 't' has the type MXFP4"),
    "unheard-of type": (file_bytes([], [tensor("t", (256, 2), 99)], DATA), r"tensor 't' has the type ggml type 99"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_by_name_and_cost_nothing(case: str, tmp_path: Path) -> None:
    data, message = BAD_FILES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ExportError, match=message) as caught:
            open_checkpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [4, 8, 9, 12])
def test_a_file_large_enough_for_its_absurd_array_is_refused_without_reading_it(kind: int, tmp_path: Path) -> None:
    path = tmp_path / "bomb.gguf"
    path.write_bytes(file_bytes([pair("bomb", 9, array(kind, 100_000_000))], []))
    with path.open("r+b") as file:
        file.truncate(4 << 30)  # sparse: takes no space
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"the value of 'bomb' has 100000000 elements; the limit"):
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_unknown_types_are_unsupported_and_damage_is_not(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(BAD_FILES["Q2_K"][0])
    with pytest.raises(UnsupportedError):
        open_checkpoint(path)
    path.write_bytes(BAD_FILES["offset outside"][0])
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


def test_every_value_type_and_version_2(tmp_path: Path) -> None:
    pairs = [
        pair("u8", 0, b"\xff"),
        pair("i8", 1, b"\xff"),
        pair("u16", 2, struct.pack("<H", 65535)),
        pair("i16", 3, struct.pack("<h", -2)),
        pair("u32", 4, struct.pack("<I", 1 << 31)),
        pair("i32", 5, struct.pack("<i", -3)),
        pair("f32", 6, struct.pack("<f", 0.5)),
        pair("bool", 7, b"\1"),
        pair("text", 8, text("häß")),
        pair("strings", 9, array(8, 3, text("") + text("▁a") + text("b"))),
        pair("floats", 9, array(6, 2, struct.pack("<2f", 1, -1))),
        pair("nested", 9, array(9, 2, array(0, 1, b"\7") + array(8, 1, text("x")))),
        pair("u64", 10, struct.pack("<Q", (1 << 64) - 1)),
        pair("i64", 11, struct.pack("<q", -(1 << 63))),
        pair("f64", 12, struct.pack("<d", 0.1)),
    ]
    path = tmp_path / "model.gguf"
    path.write_bytes(file_bytes(pairs, [tensor("t", (3, 2))], struct.pack("<6f", *range(6)), version=2))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata == {
            "u8": 255,
            "i8": -1,
            "u16": 65535,
            "i16": -2,
            "u32": 1 << 31,
            "i32": -3,
            "f32": 0.5,
            "bool": True,
            "text": "häß",
            "strings": ["", "▁a", "b"],
            "floats": [1.0, -1.0],
            "nested": [[7], ["x"]],
            "u64": (1 << 64) - 1,
            "i64": -(1 << 63),
            "f64": 0.1,
        }
        assert checkpoint.name == "model"
        assert read_tensor(checkpoint.tensors["t"]).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", ["gguf-f32", "gguf-bf16", "gguf-q5_1"])
def test_agrees_with_the_gguf_package(kind: str, tiny: Callable[[str, str], Path]) -> None:
    path = tiny("llama", kind)
    theirs = gguf.GGUFReader(path)
    with open_checkpoint(path) as checkpoint:
        assert {t.name for t in theirs.tensors} == set(checkpoint.tensors)
        for other in theirs.tensors:
            ours = checkpoint.tensors[other.name]
            assert ours.shape == tuple(int(n) for n in reversed(other.shape))
            assert np.array_equal(raw_rows(ours).ravel(), np.asarray(other.data).view(np.uint8).ravel())
        for key, field in theirs.fields.items():
            if not key.startswith("GGUF."):
                assert checkpoint.metadata[key] == field.contents()


# --- split files ---------------------------------------------------------------------------------------------------
def write_split(folder: Path, **changes: Any) -> list[Path]:
    """Three parts with a tensor each; `changes`: count, total, number of the second part."""
    paths = []
    for index in range(3):
        number = changes.get("number", 1) if index == 1 else index
        pairs = [
            pair("split.no", 2, struct.pack("<H", number)),
            pair("split.count", 2, struct.pack("<H", changes.get("count", 3))),
            pair("split.tensors.count", 5, struct.pack("<i", changes.get("total", 3))),
        ]
        name = "t0" if changes.get("twice") else f"t{index}"
        data = struct.pack("<8f", *[index] * 8)
        paths.append(folder / f"tiny-{index + 1:05d}-of-00003.gguf")
        extra = [ARCHITECTURE] if index == 0 else []
        paths[-1].write_bytes(file_bytes([*extra, *pairs], [tensor(name, (8,))], data))
    return paths


def test_any_part_opens_the_whole_model(tmp_path: Path) -> None:
    for path in write_split(tmp_path):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.metadata["general.architecture"] == "llama"
            assert [read_tensor(checkpoint.tensors[f"t{i}"])[0] for i in range(3)] == [0, 1, 2]
            assert [f.path.name for f in checkpoint.files] == [p.name for p in sorted(tmp_path.iterdir())]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second, _ = write_split(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"part tiny-00002-of-00003.gguf of this split model is missing"):
        weight_paths(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 4}, r"split.no = 0 and split.count = 4, but the file name says part 0 of 3"),
        ({"number": 2}, r"split.no = 2 and split.count = 3, but the file name says part 1 of 3"),
        ({"total": 5}, r"split.tensors.count = 5, the parts hold 3 tensors"),
        ({"twice": True}, r"the tensor 't0' is in another part too"),
    ],
)
def test_inconsistent_parts_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_split(tmp_path, **changes)[0])


def test_a_renamed_part_is_refused(tmp_path: Path) -> None:
    lone = write_split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"one part of a model in split.count = 3 parts"):
        open_checkpoint(lone)


# --- fuzz ----------------------------------------------------------------------------------------------------------
@pytest.mark.timeout(120)
def test_flipped_bytes_end_in_an_export_error_or_a_model(tiny: Callable[[str, str], Path], tmp_path: Path) -> None:
    """600 files with up to four damaged header bytes or a cut: only ExportError may come out."""
    good = tiny("llama", "gguf-q4_0").read_bytes()
    with open_checkpoint(tiny("llama", "gguf-q4_0")) as checkpoint:
        header = min(t.offset for t in checkpoint.tensors.values())
    dice = random.Random(5)
    refused = 0
    path = tmp_path / "model.gguf"
    for _ in range(600):
        damaged = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(header)] = dice.choice((0, 1, 127, 128, 255, dice.randrange(256)))
        cut = dice.randrange(len(good)) if dice.random() < 0.2 else len(good)
        path.write_bytes(damaged[: max(cut, 1)])
        try:
            with open_checkpoint(path) as checkpoint:
                build_model(checkpoint)
        except ExportError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100
