"""Blocks -> ONNX: the graph keeps to the contract, and its weights are the bytes of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from trivet.backends.contract.formats import FORMATS
from trivet.backends.contract.opset import DOMAIN, GRAPH_INPUTS, GRAPH_OUTPUTS, OPS, OPSET_VERSION
from trivet.exporters.architectures import build_model
from trivet.exporters.checkpoint import open_checkpoint
from trivet.exporters.graph import build_graph

Tiny = Callable[[str, str], Path]
MODELS = ["llama", "llama_tied", "llama3", "mistral", "qwen2", "qwen3", "gemma3"]


def graph_of(path: Path) -> onnx.ModelProto:
    with open_checkpoint(path) as checkpoint:
        return build_graph(build_model(checkpoint), "tiny", "0")


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


@pytest.mark.parametrize("kind", ["safetensors", "gguf-q4_0"])
@pytest.mark.parametrize("name", MODELS)
def test_nodes_keep_to_the_contract(name: str, kind: str, tiny: Tiny) -> None:
    model = graph_of(tiny(name, kind))
    graph = model.graph
    assert {o.domain: o.version for o in model.opset_import}[DOMAIN] == OPSET_VERSION
    assert [i.name for i in graph.input] == list(GRAPH_INPUTS)
    assert [o.name for o in graph.output] == list(GRAPH_OUTPUTS)
    known = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    for node in graph.node:
        schema = OPS[node.op_type]
        assert node.domain == DOMAIN
        assert set(attributes(node)) == set(schema.attributes)
        assert len(node.output) == len(schema.outputs)
        for position, value in enumerate(node.input):
            assert value in known or (not value and schema.inputs[position].endswith("?"))
        assert not known & set(node.output), "every value is written once"
        known |= set(node.output)
    assert set(GRAPH_OUTPUTS) <= known
    layers = sum(node.op_type == "PagedAttention" for node in graph.node)
    assert {f"layers.{i}.residual" for i in range(layers)} == {v.name for v in graph.value_info} <= known


@pytest.mark.parametrize(("name", "kind"), [("llama", "safetensors-sharded"), ("qwen2", "gguf-q8_0")])
def test_weights_are_the_bytes_of_the_checkpoint(name: str, kind: str, tiny: Tiny) -> None:
    path = tiny(name, kind)
    with open_checkpoint(path) as checkpoint:
        model = build_model(checkpoint)
        graph = build_graph(model, "tiny", "0").graph
        external = [i for i in graph.initializer if i.data_location == onnx.TensorProto.EXTERNAL]
        assert {i.name for i in external} == {n for n, t in model.tensors.items() if len(t.shape) == 2}
        assert len({i.name for i in graph.initializer}) == len(graph.initializer)
        for initializer in external:
            place = {e.key: e.value for e in initializer.external_data}
            tensor = model.tensors[initializer.name]
            assert place["location"] == tensor.file.path.name
            assert (int(place["offset"]), int(place["length"])) == (tensor.offset, tensor.nbytes)
            row_bytes = FORMATS[tensor.format].row_bytes(tensor.shape[1])
            assert list(initializer.dims) == [tensor.shape[0], row_bytes]
            assert initializer.data_type == onnx.TensorProto.UINT8
    inline = sum(i.ByteSize() for i in graph.initializer if i.data_location != onnx.TensorProto.EXTERNAL)
    assert inline < 20_000


def test_a_gguf_and_a_directory_give_the_same_graph(tiny: Tiny) -> None:
    for name in ("llama", "gemma3", "qwen2"):
        ours, theirs = (graph_of(tiny(name, kind)).graph for kind in ("safetensors", "gguf-f32"))
        for a, b in zip(ours.node, theirs.node, strict=True):
            assert (a.op_type, a.input, a.output) == (b.op_type, b.input, b.output)
            left, right = attributes(a), attributes(b)
            for values in (left, right):
                values.pop("rope_interleaved", None)
            assert left == right
        inline = {i.name: i for i in theirs.initializer}
        for initializer in ours.initializer:
            if initializer.data_location != onnx.TensorProto.EXTERNAL:
                expected = numpy_helper.to_array(inline[initializer.name])
                assert np.allclose(numpy_helper.to_array(initializer), expected, rtol=1e-6, atol=0)


def test_gemma_norms_hold_one_plus_w(tiny: Tiny) -> None:
    with open_checkpoint(tiny("gemma3", "safetensors")) as checkpoint:
        stored = checkpoint.tensors["model.norm.weight"]
        raw = np.frombuffer(stored.file.map, np.float32, stored.num_elements, stored.offset).copy()
    graph = graph_of(tiny("gemma3", "safetensors")).graph
    folded = next(numpy_helper.to_array(i) for i in graph.initializer if i.name == "model.norm.weight")
    assert np.array_equal(folded, raw + np.float32(1))
    posts = [n for n in graph.node if n.op_type == "AddRMSNorm" and len(n.input) > 3 and n.input[3]]
    assert len(posts) == 2 * 7


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_behind_the_last_attention_only_sampled_rows_are_left(name: str, tiny: Tiny) -> None:
    graph = graph_of(tiny(name, "safetensors")).graph
    layers = sum(n.op_type == "PagedAttention" for n in graph.node)
    last = f"layers.{layers - 1}."
    readers = [n for n in graph.node if "logits_indices" in n.input]
    assert [n.output[0] for n in readers] == [last + "mlp_norm"]
    names = [value.rstrip("?") for value in OPS["AddRMSNorm"].inputs]
    assert readers[0].input[names.index("rows")] == "logits_indices"
    assert readers[0].input[names.index("x")] == last + "attention_out"
    shapes = {v.name: v.type.tensor_type.shape.dim[0].dim_param for v in graph.value_info}
    assert shapes == {f"layers.{i}.residual": "T" for i in range(layers - 1)} | {last + "residual": "S"}


def test_kv_offsets_follow_each_other(tiny: Tiny) -> None:
    nodes = [n for n in graph_of(tiny("llama", "safetensors")).graph.node if n.op_type == "PagedAttention"]
    assert [attributes(n)["kv_offset"] for n in nodes] == [0, 64, 128]
    assert [n.input[1] for n in nodes] == ["kv_cache", "layers.0.kv_cache", "layers.1.kv_cache"]
    assert nodes[-1].output[1] == "kv_cache_out"


def test_qkv_is_one_product_with_a_format_per_weight(tiny: Tiny) -> None:
    node = next(n for n in graph_of(tiny("qwen2", "gguf-q5_0")).graph.node if n.output[0] == "layers.0.qkv")
    assert attributes(node)["formats"] == b"q5_0,q5_0,q5_0"
    assert attributes(node)["out_features"] == [64, 32, 32]
    assert node.input[1] == "layers.0.qkv.bias"
