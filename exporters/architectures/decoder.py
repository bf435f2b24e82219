"""The pre-norm decoder that llama, qwen2, qwen3 and gemma3 share: a config with their differences, and its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..checkpoint.hf_config import ConfigReader
from ..dequantize import raw_rows, read_tensor
from ..errors import ConfigError, UnsupportedError
from .model import Attention, DecoderLayer, Linear, Mlp, Model, Norm, Rope
from .rope import RopeParameters, divide_by_factors
from .sizes import Sizes
from .tensor_table import TensorTable

GGUF_NAMES: Final[dict[str, str]] = {  # Hugging Face name -> GGUF name; layers without their prefix
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",  # GGUF only
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    **{
        f"{ours}.{part}": f"{theirs}.{part}"
        for part in ("weight", "bias")
        for ours, theirs in (
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        )
    },
}
IGNORABLE: Final = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)  # derived from the config


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Names and meanings as in config.json."""

    family: str
    sizes: Sizes
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"  # "silu" | "gelu_tanh"
    layer_windows: tuple[int, ...] = ()  # per layer, 0 = full attention; empty = full everywhere
    local_rope: RopeParameters | None = None  # of the layers with a window, if theirs is another
    attention_scale: float | None = None  # None = head_dim ** -0.5
    attention_soft_cap: float = 0.0
    logits_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    norm_weight_offset: float = 0.0
    block_post_norms: bool = False  # Gemma: norms after attention and after the MLP, too
    rope_interleaved: bool = False


def build(config: DecoderConfig, table: TensorTable, reader: ConfigReader) -> Model:
    """Make the blocks; raises on a tensor that is missing, misshapen or left over."""
    windows = config.layer_windows or (0,) * config.sizes.num_hidden_layers
    ropes = {"rope": _rope(config.rope, config, table)}
    if config.local_rope is not None and any(windows):
        ropes["local_rope"] = _rope(config.local_rope, config, table)
    embedding = table.take("model.embed_tokens.weight", config.sizes.vocab_size, config.sizes.hidden_size)
    layers = tuple(
        _layer(config, table, index, window, "local_rope" if window and "local_rope" in ropes else "rope")
        for index, window in enumerate(windows)
    )
    final_norm = _norm(config, table, "model.norm.weight", config.sizes.hidden_size)
    lm_head = _lm_head(config, table, embedding)
    table.finish()
    return Model(
        family=config.family,
        vocab_size=config.sizes.vocab_size,
        hidden_size=config.sizes.hidden_size,
        max_position_embeddings=config.sizes.max_position_embeddings,
        embedding=embedding,
        embedding_scale=config.embedding_scale,
        ropes=ropes,
        layers=layers,
        final_norm=final_norm,
        lm_head=lm_head,
        logits_soft_cap=config.logits_soft_cap,
        tensors=table.used,
        unread_config=tuple(reader.unread()) if table.checkpoint.kind == "safetensors" else (),
    )


def _rope(parameters: RopeParameters, config: DecoderConfig, table: TensorTable) -> Rope:
    inv_freq = parameters.inv_freq(config.sizes.head_dim)
    if table.checkpoint.kind == "gguf" and "rope_freqs.weight" in table:
        factors = read_tensor(table.consume("rope_freqs.weight", config.sizes.head_dim // 2))
        if not np.all(np.isfinite(factors)) or not np.all(factors > 0):
            raise ConfigError(f"{table.checkpoint.path}: rope_freqs.weight holds values that are not positive")
        inv_freq = divide_by_factors(inv_freq, factors)
    return Rope(tuple(float(f) for f in inv_freq))


def _norm(config: DecoderConfig, table: TensorTable, name: str, size: int) -> Norm:
    return Norm(table.take(name, size), config.rms_norm_eps, config.norm_weight_offset)


def _linear(table: TensorTable, name: str, in_features: int, out_features: int, has_bias: bool) -> Linear:
    weight = table.take(f"{name}.weight", out_features, in_features)
    bias = table.take(f"{name}.bias", out_features) if has_bias else None
    return Linear(weight, in_features, out_features, bias)


def _layer(config: DecoderConfig, table: TensorTable, index: int, window: int, rope: str) -> DecoderLayer:
    prefix = f"model.layers.{index}."
    hidden = config.sizes.hidden_size
    post = config.block_post_norms
    mlp_norm = "pre_feedforward_layernorm" if post else "post_attention_layernorm"
    return DecoderLayer(
        input_norm=_norm(config, table, prefix + "input_layernorm.weight", hidden),
        attention=_attention(config, table, prefix + "self_attn.", window, rope),
        post_attention_norm=_norm(config, table, prefix + "post_attention_layernorm.weight", hidden) if post else None,
        mlp_norm=_norm(config, table, f"{prefix}{mlp_norm}.weight", hidden),
        mlp=Mlp(
            gate=_linear(table, prefix + "mlp.gate_proj", hidden, config.sizes.intermediate_size, config.mlp_bias),
            up=_linear(table, prefix + "mlp.up_proj", hidden, config.sizes.intermediate_size, config.mlp_bias),
            down=_linear(table, prefix + "mlp.down_proj", config.sizes.intermediate_size, hidden, config.mlp_bias),
            activation=config.hidden_act,
        ),
        post_mlp_norm=_norm(config, table, prefix + "post_feedforward_layernorm.weight", hidden) if post else None,
    )


def _attention(config: DecoderConfig, table: TensorTable, prefix: str, window: int, rope: str) -> Attention:
    hidden, head_dim = config.sizes.hidden_size, config.sizes.head_dim
    q_size, kv_size = config.sizes.num_attention_heads * head_dim, config.sizes.num_key_value_heads * head_dim
    scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return Attention(
        q=_linear(table, prefix + "q_proj", hidden, q_size, config.qkv_bias),
        k=_linear(table, prefix + "k_proj", hidden, kv_size, config.qkv_bias),
        v=_linear(table, prefix + "v_proj", hidden, kv_size, config.qkv_bias),
        o=_linear(table, prefix + "o_proj", q_size, hidden, config.o_bias),
        num_heads=config.sizes.num_attention_heads,
        num_kv_heads=config.sizes.num_key_value_heads,
        head_dim=head_dim,
        scale=scale,
        rope=rope,
        rope_interleaved=config.rope_interleaved,
        sliding_window=window,
        soft_cap=config.attention_soft_cap,
        q_norm=_norm(config, table, prefix + "q_norm.weight", head_dim) if config.qk_norm else None,
        k_norm=_norm(config, table, prefix + "k_norm.weight", head_dim) if config.qk_norm else None,
    )


def _lm_head(config: DecoderConfig, table: TensorTable, embedding: str) -> str:
    """The output matrix: the embedding if the words are tied, else a tensor of its own."""
    name = "lm_head.weight"
    if not config.tie_word_embeddings:
        return table.take(name, config.sizes.vocab_size, config.sizes.hidden_size)
    if name not in table:
        return embedding
    head, tied = table.consume(name, config.sizes.vocab_size, config.sizes.hidden_size), table.used[embedding]
    if head.format != tied.format or not np.array_equal(raw_rows(head), raw_rows(tied)):
        raise UnsupportedError(
            f"{table.checkpoint.path}: tie_word_embeddings is true, but {head.name!r} differs from {tied.name!r}; "
            f"set tie_word_embeddings to false if the model has its own output matrix"
        )
    return embedding
