"""Config values and tensors -> blocks: what each family reads, and what is refused by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trivet.exporters.architectures import build_model
from trivet.exporters.architectures.model import Model
from trivet.exporters.architectures.rope import Llama3Scaling, RopeParameters
from trivet.exporters.checkpoint import Checkpoint, open_checkpoint
from trivet.exporters.errors import ConfigError, ExportError, UnsupportedError

Tiny = Callable[[str, str], Path]


def build(path: Path, config: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None) -> Model:
    """The model of a checkpoint whose config or metadata was changed; a value of None removes a GGUF key."""
    with open_checkpoint(path) as checkpoint:
        changed = {k: v for k, v in (checkpoint.metadata | (metadata or {})).items() if v is not None}
        return build_model(dataclasses.replace(checkpoint, config=checkpoint.config | (config or {}), metadata=changed))


CONFIG_REFUSALS: list[tuple[str, dict[str, Any], type[ExportError], str]] = [
    ("llama", {"model_type": "mamba"}, UnsupportedError, r"model_type is 'mamba', supported are llama, mistral, qwen2"),
    ("llama", {"model_type": None}, ExportError, r"model_type is missing, expected one of llama"),
    ("gemma3", {"model_type": "gemma3"}, UnsupportedError, r"model_type is 'gemma3'.*vision tower"),
    ("llama", {"hidden_size": None}, ConfigError, r"config.json: hidden_size is None, expected an integer from 1"),
    ("llama", {"hidden_size": "64"}, ConfigError, r"hidden_size is '64', expected an integer"),
    ("llama", {"hidden_size": True}, ConfigError, r"hidden_size is True, expected an integer"),
    ("llama", {"hidden_size": 1 << 40}, ConfigError, r"hidden_size is 1099511627776, expected an integer from 1 to"),
    ("llama", {"num_hidden_layers": 0}, ConfigError, r"num_hidden_layers is 0, expected an integer from 1 to 1024"),
    ("llama", {"num_hidden_layers": -3}, ConfigError, r"num_hidden_layers is -3"),
    ("llama", {"num_key_value_heads": 3}, ConfigError, r"num_key_value_heads is 3, expected a divisor of the 4"),
    ("llama", {"head_dim": 15}, ConfigError, r"head_dim is 15, expected an even number"),
    ("llama", {"rms_norm_eps": float("nan")}, ConfigError, r"rms_norm_eps is nan, expected a number from"),
    ("llama", {"rms_norm_eps": 0}, ConfigError, r"rms_norm_eps is 0, expected a number from 1e-12 to 1"),
    ("llama", {"rope_theta": -1.0}, ConfigError, r"rope_theta is -1.0, expected a number from 1 to"),
    ("llama", {"tie_word_embeddings": "no"}, ConfigError, r"tie_word_embeddings is 'no', expected true or false"),
    ("llama", {"hidden_act": "gelu"}, UnsupportedError, r"hidden_act is 'gelu', expected one of silu"),
    ("llama", {"pretraining_tp": 2}, UnsupportedError, r"pretraining_tp is 2, expected 1 or absent"),
    ("llama", {"sliding_window": 7}, UnsupportedError, r"sliding_window is 7, expected absent"),
    ("llama", {"num_local_experts": 8}, UnsupportedError, r"num_local_experts is 8, expected 0 or absent"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, r"with quant_method 'gptq' is not"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedError, r"rope_type is 'yarn'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, UnsupportedError, r"type is 'dynamic', expected"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, ConfigError, r"rope_scaling: factor is missing, expected a"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2, "mscale": 1}}, UnsupportedError, r"mscale is not"),
    ("llama", {"rope_scaling": [1]}, ConfigError, r"rope_scaling is \[1\], expected an object"),
    ("llama", {"partial_rotary_factor": 0.5}, UnsupportedError, r"partial_rotary_factor is 0.5, expected 1"),
    ("llama3", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ConfigError, r"low_freq_factor is missing"),
    ("mistral", {"attention_bias": True}, UnsupportedError, r"attention_bias is True, expected False or absent"),
    ("mistral", {"sliding_window": 0}, ConfigError, r"sliding_window is 0, expected an integer from 1"),
    ("qwen2", {"layer_types": ["full_attention"]}, ConfigError, r"layer_types is .*, expected a list of 3 strings"),
    ("qwen2", {"layer_types": ["chunked"] * 3}, UnsupportedError, r"layer_types holds 'chunked'"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ConfigError, r"since use_sliding_window is off"),
    ("gemma3", {"hidden_activation": "gelu"}, UnsupportedError, r"hidden_activation is 'gelu'"),
    ("gemma3", {"use_bidirectional_attention": True}, UnsupportedError, r"use_bidirectional_attention is True"),
    ("gemma3", {"rope_scaling": {"rope_type": "llama3"}}, ConfigError, r"low_freq_factor is missing"),
    ("gemma3", {"rope_parameters": {"chunked_attention": {}}}, UnsupportedError, r"chunked_attention is unknown"),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), CONFIG_REFUSALS)
def test_config_values_are_refused_by_name(
    name: str, change: dict[str, Any], error: type[ExportError], message: str, tiny: Tiny
) -> None:
    with pytest.raises(error, match=message) as caught:
        build(tiny(name, "safetensors"), config=change)
    assert "\n" not in str(caught.value)


GGUF_REFUSALS: list[tuple[str, dict[str, Any], type[ExportError], str]] = [
    ("llama", {"general.architecture": "rwkv7"}, UnsupportedError, r"general.architecture is 'rwkv7', supported are"),
    ("llama", {"general.architecture": None}, ExportError, r"general.architecture is missing"),
    ("llama", {"llama.block_count": None}, ConfigError, r"llama.block_count is missing, expected an integer"),
    ("llama", {"llama.block_count": 1 << 40}, ConfigError, r"llama.block_count is \d+, expected an integer from 1"),
    ("llama", {"llama.attention.head_count_kv": [2, 2, 2]}, ConfigError, r"head_count_kv is \[2, 2, 2\], expected an"),
    ("llama", {"llama.attention.value_length": 8}, UnsupportedError, r"value_length is 8, expected 16 or absent"),
    ("llama", {"llama.rope.dimension_count": 8}, UnsupportedError, r"rope.dimension_count is 8, expected 16"),
    ("llama", {"llama.rope.scaling.type": "yarn"}, UnsupportedError, r"scaling.type is 'yarn', expected one of none"),
    ("llama", {"llama.rope.scaling.factor": 4.0}, UnsupportedError, r"rope.scaling.factor is 4.0, expected 1.0"),
    ("llama", {"llama.expert_count": 8}, UnsupportedError, r"llama.expert_count is 8, expected 0"),
    ("qwen3", {"qwen3.attention.surprise": 1}, UnsupportedError, r"the key qwen3.attention.surprise = 1 is not known"),
    ("gemma3", {"gemma3.attention.sliding_window": None}, ConfigError, r"sliding_window is missing"),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), GGUF_REFUSALS)
def test_gguf_metadata_is_refused_by_name(
    name: str, change: dict[str, Any], error: type[ExportError], message: str, tiny: Tiny
) -> None:
    with pytest.raises(error, match=message):
        build(tiny(name, "gguf-f32"), metadata=change)


def test_the_head_of_untied_words_must_be_there(tiny: Tiny) -> None:
    with pytest.raises(ExportError, match=r"tensor 'lm_head.weight' is missing, expected shape \[384, 64\]"):
        build(tiny("llama_tied", "safetensors"), config={"tie_word_embeddings": False})


def test_tied_words_with_another_head_are_refused(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedError, match=r"tie_word_embeddings is true, but 'lm_head.weight' differs from"):
        build(tiny("llama", "safetensors"), config={"tie_word_embeddings": True})


@pytest.mark.parametrize("name", ["llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3"])
def test_gguf_and_safetensors_give_the_same_blocks(name: str, tiny: Tiny) -> None:
    """All but the permutation of llama's q and k, the folded 1 + w of Gemma's norms, and roundings of the metadata."""
    ours, theirs = build(tiny(name, "safetensors")), build(tiny(name, "gguf-f32"))
    assert set(ours.tensors) == set(theirs.tensors)
    for rope_name, rope in ours.ropes.items():
        np.testing.assert_allclose(rope.inv_freq, theirs.ropes[rope_name].inv_freq, rtol=1e-6)

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: plain(v)
                for k, v in value.items()
                if k not in ("tensors", "unread_config", "rope_interleaved", "weight_offset", "ropes")
            }
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return float(np.float32(value)) if isinstance(value, float) else value

    def as_data(model: Model) -> Any:
        return plain(dataclasses.asdict(dataclasses.replace(model, tensors={})))

    assert as_data(ours) == as_data(theirs)
    assert {layer.attention.rope_interleaved for layer in theirs.layers} == {name in ("llama", "llama3", "mistral")}
    assert not any(layer.attention.rope_interleaved for layer in ours.layers)


def test_old_and_new_spellings_of_rope_mean_the_same(tiny: Tiny) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 256}
    old = {"rope_theta": 5e4, "rope_scaling": {"type": "linear", **scaling}, "rope_parameters": None}
    new = {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, **scaling},
    }
    path = tiny("llama", "safetensors")
    expected = RopeParameters(5e4, linear_factor=4.0).inv_freq(16)
    for config in (old, new):
        assert np.array_equal(np.array(build(path, config).ropes["rope"].inv_freq, np.float32), expected)


def test_gemma_ropes_in_both_spellings(tiny: Tiny) -> None:
    path = tiny("gemma3", "safetensors")
    old = build(path, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    new = build(
        path,
        {
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    )
    assert old.ropes == new.ropes
    assert np.allclose(old.ropes["rope"].inv_freq, RopeParameters(1e6, linear_factor=8.0).inv_freq(32))
    assert np.allclose(old.ropes["local_rope"].inv_freq, RopeParameters(1e4).inv_freq(32))


def test_gemma_layers(tiny: Tiny) -> None:
    model = build(tiny("gemma3", "safetensors"))
    assert [layer.attention.sliding_window for layer in model.layers] == [16] * 5 + [0] + [16]
    assert [layer.attention.rope for layer in model.layers] == ["local_rope"] * 5 + ["rope"] + ["local_rope"]
    assert model.embedding_scale == 8.0
    explicit = build(
        tiny("gemma3", "safetensors"),
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 6, "final_logit_softcapping": 30.0},
    )
    assert [layer.attention.sliding_window for layer in explicit.layers] == [0] + [16] * 6
    assert explicit.logits_soft_cap == 30.0


def test_gemma_windows_of_gguf_files(tiny: Tiny) -> None:
    path, key = tiny("gemma3", "gguf-f32"), "gemma3.attention.sliding_window_pattern"
    cases: list[tuple[Any, list[int]]] = [
        (None, [16] * 5 + [0, 16]),
        (2, [16, 0] * 3 + [16]),
        ([False] + [True] * 6, [0] + [16] * 6),
    ]
    for pattern, windows in cases:
        layers = build(path, metadata={key: pattern}).layers
        assert [layer.attention.sliding_window for layer in layers] == windows
    with pytest.raises(ConfigError, match=r"sliding_window_pattern is \[True\], expected a number or 7 booleans"):
        build(path, metadata={key: [True]})


def test_qwen_windows(tiny: Tiny) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
    model = build(tiny("qwen2", "safetensors"), windows)
    assert [layer.attention.sliding_window for layer in model.layers] == [0, 0, 32]


def test_mistral_windows(tiny: Tiny) -> None:
    path = tiny("mistral", "safetensors")
    assert {layer.attention.sliding_window for layer in build(path).layers} == {16}
    assert {layer.attention.sliding_window for layer in build(path, {"sliding_window": None}).layers} == {0}
    assert {layer.attention.sliding_window for layer in build(tiny("mistral", "gguf-f32")).layers} == {16}


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = RopeParameters(5e5).inv_freq(128).astype(np.float64)
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    scaled = RopeParameters(5e5, llama3=scaling).inv_freq(128).astype(np.float64)
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4], rtol=1e-6)
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    middle = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert middle.any()
    assert np.all((scaled[middle] < plain[middle]) & (scaled[middle] > plain[middle] / 8))
    equal = RopeParameters(5e5, llama3=Llama3Scaling(8.0, 2.0, 2.0, 8192)).inv_freq(128)
    np.testing.assert_allclose(equal, np.where(wavelength < 4096, plain, plain / 8), rtol=1e-6)


def test_config_keys_without_effect_are_recorded(tiny: Tiny) -> None:
    assert "surprise" in build(tiny("llama", "safetensors"), {"surprise": 1}).unread_config


def test_checkpoints_are_closed_by_their_context(tiny: Tiny) -> None:
    with open_checkpoint(tiny("llama", "gguf-f32")) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.files[0].map.closed
