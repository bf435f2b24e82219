"""external_tensors: what the onnx package reads from the same bytes, and an error for anything else."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from trivet.backends.contract.manifest import GRAPH_NAME, read_manifest
from trivet.backends.cpu import weight_files
from trivet.backends.cpu.external_data import ExternalTensor, external_tensors
from trivet.backends.cpu.weight_files import WeightFiles
from trivet.backends.errors import SessionCreateError
from trivet.backends.library import map_cached_pages
from trivet.backends.session import ModelSession
from trivet.exporters import export

_MIB = 1 << 20


@pytest.fixture(scope="module")
def package(tiny: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    return export(tiny("qwen2", "safetensors-sharded"), folder / "qwen2", verify=False)


def test_they_are_what_onnx_reads(package: Path) -> None:
    raw = (package / GRAPH_NAME).read_bytes()
    graph = onnx.load_model_from_string(raw).graph
    expected = []
    for tensor in graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            readers = {node.op_type for node in graph.node if tensor.name in node.input}
            expected.append(
                ExternalTensor(
                    tensor.name, tuple(tensor.dims), place["location"], int(place["offset"]),
                    readers == {"EmbedTokens"},
                )
            )  # fmt: skip
    assert len({tensor.location for tensor in expected}) > 1
    assert list(external_tensors(raw)) == expected


@pytest.mark.parametrize("cut", [1, 10, 1000])
def test_a_damaged_graph_is_an_error(cut: int, package: Path) -> None:
    raw = (package / GRAPH_NAME).read_bytes()
    with pytest.raises(ValueError, match="not a graph"):
        list(external_tensors(raw[:-cut]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("length", "7"), ("offset", "9999999"), ("location", "elsewhere.gguf"),
        ("length", None), ("offset", None), ("location", None),
    ],
)  # fmt: skip
def test_a_weight_that_is_not_in_its_file_is_named(key: str, value: str | None, package: Path, tmp_path: Path) -> None:
    """None: its place lacks this entry."""
    model = onnx.load(str(package / GRAPH_NAME), load_external_data=False)
    weight = next(t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    entry = next(entry for entry in weight.external_data if entry.key == key)
    if value is None:
        weight.external_data.remove(entry)
    else:
        entry.value = value
    (tmp_path / GRAPH_NAME).write_bytes(model.SerializeToString())
    with pytest.raises(SessionCreateError, match=f"weight '{weight.name}'"):
        ModelSession(tmp_path, read_manifest(package))


def test_an_empty_weight_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(SessionCreateError, match=r"cannot be opened and mapped: cannot mmap an empty file"):
        WeightFiles([tmp_path / "weights.gguf"])


@pytest.mark.parametrize(("tied", "expected"), [(False, ["table"]), (True, [])])
def test_an_embedding_that_is_the_head_too_is_not_only_looked_up(tied: bool, expected: list[str]) -> None:
    head = "table" if tied else "head"
    nodes = [
        onnx.helper.make_node("EmbedTokens", ["input_ids", "table"], ["hidden"], domain="ai.trivet"),
        onnx.helper.make_node("LogitsHead", ["hidden", head], ["logits"], domain="ai.trivet"),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [], [], [external_tensor(name) for name in sorted({"table", head})])
    raw = onnx.helper.make_model(graph).SerializeToString()
    assert [tensor.name for tensor in external_tensors(raw) if tensor.is_looked_up] == expected


def external_tensor(name: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.UINT8, dims=[2, 4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "weights.gguf"), ("offset", "0"), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    return tensor


# --- pages ------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(sys.platform != "linux", reason="map_cached_pages does something on Linux only")
@pytest.mark.parametrize("stopped", [False, True])
def test_cached_pages_are_mapped_unless_stopped(stopped: bool, tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(bytes(9 * _MIB))
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    assert resident_bytes(path) == 0
    map_cached_pages([content[: 5 * _MIB], content[5 * _MIB + 7 : 6 * _MIB]], ctypes.c_int32(stopped))
    assert (resident_bytes(path) >= 6 * _MIB) == (not stopped)
    assert resident_bytes(path) < 9 * _MIB


@pytest.mark.skipif(sys.platform != "linux", reason="pages are mapped ahead on Linux only")
@pytest.mark.parametrize("fails", [False, True])
def test_mapping_ahead_ends_with_the_session_and_with_a_load_that_fails(
    fails: bool, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = threading.Event()

    def map_until_stopped(arrays: list[Any], stop: ctypes.c_int32) -> None:
        running.set()
        while not stop.value:
            time.sleep(0.001)

    def meanwhile() -> None:
        assert running.wait(10), "nothing is mapped while the session is opened"
        if fails:
            raise KeyboardInterrupt

    monkeypatch.setattr(weight_files, "map_cached_pages", map_until_stopped)
    if fails:
        with pytest.raises(KeyboardInterrupt):
            ModelSession(package, read_manifest(package), meanwhile=meanwhile)
    else:
        ModelSession(package, read_manifest(package), meanwhile=meanwhile).close()
    assert "trivet-map" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.skipif(sys.platform != "linux", reason="pages are mapped ahead on Linux only")
def test_a_file_whose_cached_pages_are_not_told_is_not_mapped_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(bytes(8))
    other = path.stat().st_uid + 1
    calls: list[Any] = []
    monkeypatch.setattr(weight_files, "map_cached_pages", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(os, "geteuid", lambda: other)
    for writable in (False, True):
        monkeypatch.setattr(os, "access", lambda *arguments, writable=writable: writable)
        weights = WeightFiles([path])
        weights.map_ahead([])
        weights.close()
        assert len(calls) == writable


def resident_bytes(path: Path) -> int:
    """Of this process's map of a file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.endswith(str(path)))
    return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])
