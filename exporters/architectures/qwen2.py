"""qwen2 (and qwen2.5): biases on q, k and v."""

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

FAMILY: Final = "qwen2"
TENSOR_NAMES: Final = GGUF_NAMES
DEFAULT_ROPE_THETA: Final = 10000.0


def from_config(reader: ConfigReader) -> DecoderConfig:
    """config.json of Qwen2ForCausalLM."""
    sizes = sizes_from_config(reader)
    reader.choice("hidden_act", ("silu",), "silu")
    reader.must_equal("attention_bias", True)  # not a field of this class, but some files carry it
    reader.must_equal("mlp_bias", False)
    refuse_common_options(reader)
    return DecoderConfig(
        family=FAMILY,
        sizes=sizes,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, low=1e-12, high=1),
        rope=rope_from_config(reader, DEFAULT_ROPE_THETA),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        qkv_bias=True,
        layer_windows=optional_windows(reader, sizes.num_hidden_layers),
    )


def from_gguf(reader: ConfigReader, table: TensorTable) -> DecoderConfig:
    """Metadata of the architecture `qwen2`."""
    config = DecoderConfig(
        family=FAMILY,
        sizes=sizes_from_gguf(reader, table.checkpoint),
        rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon", low=1e-12, high=1),
        rope=rope_from_gguf(reader, DEFAULT_ROPE_THETA),
        tie_word_embeddings="lm_head.weight" not in table,
        qkv_bias=True,
    )
    refuse_common_gguf_options(reader)
    return config
