"""gemma3, text only: local layers with a window and a rope of their own, norms on both sides of each block.

The embedding is multiplied by sqrt(hidden_size) in float32. transformers rounds that factor to the dtype it computes
in; we compute in float32, so float32 it is, as in llama.cpp and in transformers with dtype=float32.
"""

from __future__ import annotations

from typing import Final

from ..checkpoint.hf_config import ConfigReader
from .decoder import GGUF_NAMES, DecoderConfig
from .rope import RopeParameters, rope_from_gguf, ropes_by_layer_type
from .sizes import (
    MAX_POSITIONS,
    refuse_common_gguf_options,
    refuse_common_options,
    sizes_from_config,
    sizes_from_gguf,
    windows_of_layer_types,
)
from .tensor_table import TensorTable

FAMILY: Final = "gemma3"
TENSOR_NAMES: Final = {
    **GGUF_NAMES,
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
DEFAULT_ROPE_THETA: Final = 1e6
LOCAL_ROPE_THETA: Final = 1e4  # of the layers with a window; GGUF files do not carry it
DEFAULT_HEAD_DIM: Final = 256
DEFAULT_WINDOW: Final = 4096
WINDOW_PATTERN: Final = 6  # every sixth layer attends to everything
LAYERS_OF_27B: Final = 62


def from_config(reader: ConfigReader) -> DecoderConfig:
    """config.json of Gemma3ForCausalLM; defaults are those of transformers."""
    sizes = sizes_from_config(reader, default_head_dim=DEFAULT_HEAD_DIM)
    reader.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    reader.must_equal("hidden_act", "gelu_pytorch_tanh")
    refuse_common_options(reader)
    attention_bias = reader.boolean("attention_bias", False)
    full, local = ropes_by_layer_type(reader, DEFAULT_ROPE_THETA, LOCAL_ROPE_THETA)
    window = reader.integer("sliding_window", DEFAULT_WINDOW, high=MAX_POSITIONS)
    return DecoderConfig(
        family=FAMILY,
        sizes=sizes,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, low=1e-12, high=1),
        rope=full,
        local_rope=local,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        hidden_act="gelu_tanh",
        layer_windows=windows_of_layer_types(reader, _layer_types(reader, sizes.num_hidden_layers), window),
        attention_scale=reader.number("query_pre_attn_scalar", 256.0, low=1e-6, high=1e9) ** -0.5,
        attention_soft_cap=reader.number("attn_logit_softcapping", 0.0, low=1e-6, high=1e6),
        logits_soft_cap=reader.number("final_logit_softcapping", 0.0, low=1e-6, high=1e6),
        embedding_scale=sizes.hidden_size**0.5,
        norm_weight_offset=1.0,
        block_post_norms=True,
    )


def _layer_types(reader: ConfigReader, num_layers: int) -> list[str]:
    """`layer_types`, or every n-th layer full by `sliding_window_pattern` (older files)."""
    types = reader.strings("layer_types", num_layers)
    name = "_sliding_window_pattern" if reader.has("_sliding_window_pattern") else "sliding_window_pattern"
    pattern = reader.integer(name, WINDOW_PATTERN)
    if types is not None:
        return types
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]


def _local_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers have a window: a list says it for each, a number n leaves every n-th without one."""
    name = "attention.sliding_window_pattern"
    pattern = reader.raw(name)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(type(local) is bool for local in pattern):
            raise reader.fail(name, f"a number or {num_layers} booleans")
        return pattern
    every = reader.integer(name, WINDOW_PATTERN)
    return [(i + 1) % every != 0 for i in range(num_layers)]


def from_gguf(reader: ConfigReader, table: TensorTable) -> DecoderConfig:
    """Metadata of `gemma3`; its norm weights hold 1 + w already."""
    sizes = sizes_from_gguf(reader, table.checkpoint)
    layers = sizes.num_hidden_layers
    window = reader.integer("attention.sliding_window", low=1, high=MAX_POSITIONS)
    # no key says it: the 27B model alone scales by the width per head instead of the head's size
    width = sizes.hidden_size / sizes.num_attention_heads if layers == LAYERS_OF_27B else sizes.head_dim
    config = DecoderConfig(
        family=FAMILY,
        sizes=sizes,
        rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon", low=1e-12, high=1),
        rope=rope_from_gguf(reader, DEFAULT_ROPE_THETA),
        local_rope=RopeParameters(reader.number("rope.freq_base_swa", LOCAL_ROPE_THETA, low=1, high=1e12)),
        tie_word_embeddings="lm_head.weight" not in table,
        qk_norm=True,
        hidden_act="gelu_tanh",
        layer_windows=tuple(window if local else 0 for local in _local_layers(reader, layers)),
        attention_scale=width**-0.5,
        attention_soft_cap=reader.number("attn_logit_softcapping", 0.0, low=0, high=1e6),
        logits_soft_cap=reader.number("final_logit_softcapping", 0.0, low=0, high=1e6),
        embedding_scale=sizes.hidden_size**0.5,
        block_post_norms=True,
    )
    refuse_common_gguf_options(reader)
    return config
