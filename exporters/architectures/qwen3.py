"""qwen3 (dense): RMSNorm over each head of q and k, head_dim apart from hidden_size."""

from __future__ import annotations

from typing import Final

from ..checkpoint.hf_config import ConfigReader
from .decoder import GGUF_NAMES, DecoderConfig
from .rope import rope_from_config, rope_from_gguf
from .sizes import (
    optional_windows,
    refuse_common_gguf_options,
    refuse_common_options,
    sizes_from_config,
    sizes_from_gguf,
)
from .tensor_table import TensorTable

FAMILY: Final = "qwen3"
TENSOR_NAMES: Final = GGUF_NAMES
DEFAULT_ROPE_THETA: Final = 10000.0
DEFAULT_HEAD_DIM: Final = 128


def from_config(reader: ConfigReader) -> DecoderConfig:
    """config.json of Qwen3ForCausalLM."""
    sizes = sizes_from_config(reader, default_head_dim=DEFAULT_HEAD_DIM)
    reader.choice("hidden_act", ("silu",), "silu")
    reader.must_equal("mlp_bias", False)
    attention_bias = reader.boolean("attention_bias", False)
    refuse_common_options(reader)
    return DecoderConfig(
        family=FAMILY,
        sizes=sizes,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, low=1e-12, high=1),
        rope=rope_from_config(reader, DEFAULT_ROPE_THETA),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        layer_windows=optional_windows(reader, sizes.num_hidden_layers),
    )


def from_gguf(reader: ConfigReader, table: TensorTable) -> DecoderConfig:
    """Metadata of the architecture `qwen3`."""
    config = DecoderConfig(
        family=FAMILY,
        sizes=sizes_from_gguf(reader, table.checkpoint),
        rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon", low=1e-12, high=1),
        rope=rope_from_gguf(reader, DEFAULT_ROPE_THETA),
        tie_word_embeddings="lm_head.weight" not in table,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in table,
        o_bias="model.layers.0.self_attn.o_proj.bias" in table,
        qk_norm=True,
    )
    refuse_common_gguf_options(reader)
    return config
