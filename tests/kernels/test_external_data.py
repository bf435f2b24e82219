"""external_tensors: what the onnx package reads from the same bytes, and an error for anything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from trivet.backends.contract.manifest import GRAPH_NAME, read_manifest
from trivet.backends.cpu.external_data import ExternalTensor, external_tensors
from trivet.backends.cpu.weight_files import WeightFiles
from trivet.backends.errors import SessionCreateError
from trivet.backends.session import ModelSession
from trivet.exporters import export


@pytest.fixture(scope="module")
def package(tiny: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    return export(tiny("qwen2", "safetensors-sharded"), folder / "qwen2", verify=False)


def test_they_are_what_onnx_reads(package: Path) -> None:
    raw = (package / GRAPH_NAME).read_bytes()
    expected = []
    for tensor in onnx.load_model_from_string(raw).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            expected.append(ExternalTensor(tensor.name, tuple(tensor.dims), place["location"], int(place["offset"])))
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
