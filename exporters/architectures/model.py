"""A model as data: typed blocks that name the checkpoint's tensors. Only graph/ knows ONNX, only reference.py computes.

Tensor names are the checkpoint-independent ones of `Model.tensors` (those of a Hugging Face state dict).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..checkpoint.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight^T (+ bias)."""

    weight: str
    in_features: int
    out_features: int
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)."""

    weight: str
    eps: float
    weight_offset: float = 0.0  # 1 for Gemma checkpoints that store w of (1 + w)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position table; every dimension of a head is rotated."""

    inv_freq: tuple[float, ...]  # head_dim / 2 float32 values
    scale: float = 1.0  # of cos and sin


@dataclass(frozen=True, slots=True)
class Attention:
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    rope: str  # key of Model.ropes
    rope_interleaved: bool  # pairs (2i, 2i+1) instead of (i, i + head_dim/2)
    sliding_window: int = 0  # 0 = full attention
    soft_cap: float = 0.0  # 0 = none
    q_norm: Norm | None = None
    k_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """y = down(act(gate(x)) * up(x))."""

    gate: Linear
    up: Linear
    down: Linear
    activation: str  # "silu" | "gelu_tanh"


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """h = x + post_attention_norm(attention(input_norm(x))); y = h + post_mlp_norm(mlp(mlp_norm(h)))."""

    input_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    post_attention_norm: Norm | None = None  # Gemma only
    post_mlp_norm: Norm | None = None  # Gemma only


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only language model."""

    family: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    embedding: str  # weight [vocab_size, hidden_size]
    embedding_scale: float
    ropes: Mapping[str, Rope]
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    lm_head: str  # weight [vocab_size, hidden_size]; the embedding's name if tied
    logits_soft_cap: float  # 0 = none
    tensors: Mapping[str, TensorInfo]  # every tensor that the blocks name
    unread_config: tuple[str, ...]  # keys of config.json that have no part in the computation
