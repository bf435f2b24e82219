"""The proof of an export: what agrees, what is refused and by which layer, and graphs that cannot run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file
from tiny_writers import write_safetensors_file
from trivet.backends.contract.manifest import read_manifest
from trivet.backends.errors import UnsupportedDeviceError
from trivet.exporters import export, package_folder, pipeline
from trivet.exporters.errors import ExportError, VerificationError
from trivet.exporters.verify import TOLERANCE, relative_error

Tiny = Callable[[str, str], Path]
VERIFIED = [
    *((name, kind) for name in ("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3") for kind in ("gguf-f32",)),
    ("llama_tied", "safetensors"),
    ("gemma3", "safetensors"),
    ("llama", "safetensors-sharded"),
    ("llama", "safetensors-bf16"),
    ("llama", "gguf-q4_0"),
    ("llama", "gguf-q5_1"),
    ("llama_wide", "gguf-q4_k"),
    ("llama_wide", "gguf-q6_k"),
]


@pytest.mark.parametrize(("name", "kind"), VERIFIED)
def test_the_graph_computes_what_the_checkpoint_says(name: str, kind: str, tiny: Tiny, tmp_path: Path) -> None:
    manifest = read_manifest(export(tiny(name, kind), tmp_path / "out"))
    proof = manifest.verification
    assert proof.performed
    assert proof.tolerance == TOLERANCE
    assert proof.max_relative_error is not None and proof.max_relative_error < 1e-4


def add_biases(directory: Path, names: list[str]) -> None:
    """Give the projections of a tiny safetensors checkpoint random biases."""
    tensors = {n: ("F32", a.shape, a.tobytes()) for n, a in load_file(directory / "model.safetensors").items()}
    random = np.random.default_rng(1)
    for name, (_, shape, _) in list(tensors.items()):
        if any(f"{part}_proj.weight" in name for part in names):
            bias = np.asarray(random.standard_normal(shape[0]), np.float32)
            tensors[name.replace("weight", "bias")] = ("F32", bias.shape, bias.tobytes())
    write_safetensors_file(directory / "model.safetensors", tensors)


@pytest.mark.parametrize("options", [("attention_bias",), ("mlp_bias",), ("attention_bias", "mlp_bias")])
def test_biases_of_llama_are_computed(options: tuple[str, ...], tiny: Tiny, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny("llama", "safetensors"), tmp_path / "biased"))
    projections = {"attention_bias": ["q", "k", "v", "o"], "mlp_bias": ["gate", "up", "down"]}
    add_biases(directory, [part for option in options for part in projections[option]])
    with pytest.raises(ExportError, match=r"_proj.bias' .* has no place in this architecture"):
        export(directory, tmp_path / "out")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | dict.fromkeys(options, True)))
    error = read_manifest(export(directory, tmp_path / "out")).verification.max_relative_error
    assert error is not None and error < 1e-4


@pytest.mark.parametrize(
    ("node", "attribute", "value", "message"),
    [
        ("PagedAttention", "rope_interleaved", 0, r"layer 0 is the first with a relative error of \d"),
        ("PagedAttention", "scale", 0.5, r"layer 0 is the first"),
        ("LogitsHead", "soft_cap", 3.0, r"all layers agree, the logits have a relative error of"),
    ],
)
def test_a_wrong_graph_is_refused(
    node: str,
    attribute: str,
    value: float,
    message: str,
    checkpoint: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoil(model: onnx.ModelProto, folder: Path) -> None:
        for candidate in model.graph.node:
            for item in candidate.attribute:
                if candidate.op_type == node and item.name == attribute:
                    item.CopyFrom(onnx.helper.make_attribute(attribute, value))
        package_folder.write_graph(model, folder)

    monkeypatch.setattr(pipeline, "write_graph", spoil)
    with pytest.raises(VerificationError, match=message) as caught:
        export(checkpoint, cache_dir=cache)
    assert "--no-verify" in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_later_layer_is_named(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: onnx.ModelProto, folder: Path) -> None:
        node = next(n for n in model.graph.node if n.output[0] == "layers.2.gated")
        next(a for a in node.attribute if a.name == "epilogue").s = b"geglu"
        package_folder.write_graph(model, folder)

    monkeypatch.setattr(pipeline, "write_graph", spoil)
    with pytest.raises(VerificationError, match="layer 2 is the first with a relative error"):
        export(checkpoint, cache_dir=cache)


def test_a_graph_that_fails_while_it_runs_is_refused(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(model: onnx.ModelProto, folder: Path) -> None:
        node = next(n for n in model.graph.node if n.op_type == "PagedAttention")
        next(a for a in node.attribute if a.name == "kv_offset").i = 1 << 20
        package_folder.write_graph(model, folder)

    monkeypatch.setattr(pipeline, "write_graph", spoil)
    with pytest.raises(ExportError, match=r"cannot run the exported graph to prove it: step failed: PagedAttention"):
        export(checkpoint, cache_dir=cache)
    assert list(cache.iterdir()) == []


def test_without_an_op_library_the_way_out_is_named(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trivet.backends.session", None)
    with pytest.raises(ExportError, match=r"cannot run the exported graph to prove it: .*use --no-verify"):
        export(checkpoint, cache_dir=cache)
    assert export(checkpoint, cache_dir=cache, verify=False).is_dir()


def test_a_tier_that_this_cpu_has_not_is_no_reason_to_do_without_the_proof(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIVET_CPU_TIER", "nonsense")
    with pytest.raises(UnsupportedDeviceError, match=r"^\$TRIVET_CPU_TIER: unknown CPU tier 'nonsense'") as caught:
        export(checkpoint, cache_dir=cache)
    assert "--no-verify" not in str(caught.value)


def test_relative_error_is_nan_for_what_is_not_finite() -> None:
    ones = np.ones((2, 3), np.float32)
    assert relative_error(ones * np.float32(1.001), ones) == pytest.approx(1e-3, rel=1e-3)
    assert np.isnan(relative_error(ones * np.inf, ones))
    assert np.isnan(relative_error(ones[:1], ones))
