"""llama and mistral. GGUF files call both `llama`."""

from __future__ import annotations

from typing import Final

from ..checkpoint.hf_config import ConfigReader
from .decoder import GGUF_NAMES, DecoderConfig
from .rope import rope_from_config, rope_from_gguf
from .sizes import MAX_POSITIONS, refuse_common_gguf_options, refuse_common_options, sizes_from_config, sizes_from_gguf
from .tensor_table import TensorTable

FAMILY: Final = "llama"
TENSOR_NAMES: Final = GGUF_NAMES
DEFAULT_ROPE_THETA: Final = 10000.0
DEFAULT_MISTRAL_WINDOW: Final = 4096  # of transformers, for a config.json without the key


def from_config(reader: ConfigReader) -> DecoderConfig:
    """config.json of LlamaForCausalLM or MistralForCausalLM."""
    sizes = sizes_from_config(reader)
    is_mistral = reader.raw("model_type") == "mistral"
    if is_mistral:
        reader.must_equal("attention_bias", False)
        reader.must_equal("mlp_bias", False)
    attention_bias = reader.boolean("attention_bias", False)
    reader.choice("hidden_act", ("silu",), "silu")
    reader.must_equal("pretraining_tp", 1)
    reader.must_equal("rope_interleaved", False)
    reader.must_equal("layer_types", ["full_attention"] * sizes.num_hidden_layers)
    refuse_common_options(reader)
    return DecoderConfig(
        family=FAMILY,
        sizes=sizes,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, low=1e-12, high=1),
        rope=rope_from_config(reader, DEFAULT_ROPE_THETA),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=reader.boolean("mlp_bias", False),
        layer_windows=(_window(reader, is_mistral),) * sizes.num_hidden_layers,
    )


def _window(reader: ConfigReader, is_mistral: bool) -> int:
    if not is_mistral:
        reader.must_equal("sliding_window")
        return 0
    absent = 0 if "sliding_window" in reader.values else DEFAULT_MISTRAL_WINDOW  # null means full attention
    return reader.integer("sliding_window", absent, high=MAX_POSITIONS)


def from_gguf(reader: ConfigReader, table: TensorTable) -> DecoderConfig:
    """Metadata of `llama`. The rows of q and k are permuted there: rotary pairs are interleaved."""
    sizes = sizes_from_gguf(reader, table.checkpoint)
    window = reader.integer("attention.sliding_window", 0, low=0, high=MAX_POSITIONS)
    reader.must_equal("tensor_data_layout", "Meta AI original pth")  # an old name for the same interleaved order
    config = DecoderConfig(
        family=FAMILY,
        sizes=sizes,
        rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon", low=1e-12, high=1),
        rope=rope_from_gguf(reader, DEFAULT_ROPE_THETA),
        tie_word_embeddings="lm_head.weight" not in table,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in table,
        o_bias="model.layers.0.self_attn.o_proj.bias" in table,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in table,
        layer_windows=(window,) * sizes.num_hidden_layers,
        rope_interleaved=True,
    )
    refuse_common_gguf_options(reader)
    return config
