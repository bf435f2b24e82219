#!/usr/bin/env python3
"""Tiny random checkpoints of every family, the same weights as a safetensors directory and as a GGUF file.

    tiny_checkpoints.py OUT_DIR [NAME[:FORMAT] ...]

Weights are drawn per tensor from NumPy's frozen RandomState, so they depend on nothing but the model's and the
tensor's name. The standard deviation is 0.2: logits spread enough that a wrong engine picks wrong tokens.
Formats: "safetensors" (float32), "safetensors-sharded", "safetensors-f16", "safetensors-bf16", and "gguf-TYPE" for
every type of GGUF_TYPES ("gguf-f32" holds exactly the weights of "safetensors").
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tiny_writers import GGUF_TYPES, random_blocks, write_gguf, write_safetensors

Array = NDArray[np.float32]
INITIALIZER_RANGE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """One tiny model. Sizes are multiples of 32 so that every 32-element block format fits."""

    name: str
    family: str  # "llama", "mistral", "qwen2", "qwen3", "gemma3"
    hidden_size: int = 64
    intermediate_size: int = 96
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 384
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tied: bool = False
    sliding_window: int = 0
    rope_scaling: dict[str, Any] | None = None
    tokenizer_pre: str = "default"  # see tiny_tokenizers.write_tokenizer_json
    chat: bool = True
    new_style_config: bool = False  # config.json as transformers 5 writes it

    @property
    def architecture(self) -> str:
        """The GGUF architecture; Mistral is a llama there."""
        return "llama" if self.family == "mistral" else self.family


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, Tiny] = {
    m.name: m
    for m in (
        Tiny(name="llama", family="llama"),
        Tiny(name="llama_tied", family="llama", tied=True, num_key_value_heads=1, tokenizer_pre="smollm"),
        Tiny(name="llama3", family="llama", rope_theta=500000.0, rope_scaling=_LLAMA3_ROPE, tokenizer_pre="llama-bpe"),
        Tiny(name="mistral", family="mistral", head_dim=32, sliding_window=16, rms_norm_eps=1e-5),
        Tiny(name="qwen2", family="qwen2", rope_theta=1e6, tied=True, tokenizer_pre="qwen2"),
        Tiny(name="qwen3", family="qwen3", head_dim=32, rope_theta=1e6, tokenizer_pre="qwen2", new_style_config=True),
        Tiny(
            name="gemma3",
            family="gemma3",
            head_dim=32,
            num_key_value_heads=1,
            num_hidden_layers=7,  # the sixth is global, the others are local
            rope_theta=1e6,
            sliding_window=16,
            tied=True,
            tokenizer_pre="no-prefix",
            chat=False,
        ),
        Tiny(
            name="llama_wide",  # whole blocks of 256 for the K-quants
            family="llama",
            hidden_size=256,
            intermediate_size=256,
            head_dim=64,
            num_hidden_layers=2,
            tied=True,
            tokenizer_pre="llama-bpe",
        ),
    )
}


def tensor_shapes(model: Tiny) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name -> shape."""
    hidden, ffn = model.hidden_size, model.intermediate_size
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for i in range(model.num_hidden_layers):
        layer = {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if model.family == "qwen2":
            layer |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", queries), ("k", keys), ("v", keys))}
        if model.family in ("qwen3", "gemma3"):
            layer |= {f"self_attn.{p}_norm.weight": (model.head_dim,) for p in "qk"}
        if model.family == "gemma3":
            layer |= {f"{p}_feedforward_layernorm.weight": (hidden,) for p in ("pre", "post")}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


def _random(model: Tiny, name: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(f"{model.name}/{name}".encode()))


def float_weights(model: Tiny) -> dict[str, Array]:
    """The float32 weights by Hugging Face name."""
    weights = {}
    for name, shape in tensor_shapes(model).items():
        values = INITIALIZER_RANGE * _random(model, name).standard_normal(shape)
        if model.family == "gemma3":  # its norms multiply by 1 + weight
            if name == "model.norm.weight":  # signs at random, or the tied head would repeat the last token for ever
                values = values / INITIALIZER_RANGE - 1.0
        elif name.endswith("norm.weight"):
            values += 1.0
        weights[name] = values.astype(np.float32)
    return weights


def stored_weights(model: Tiny, weight_type: str) -> dict[str, NDArray[Any]]:
    """What a file of that type holds: matrices as float32 or as rows of `weight_type` bytes, vectors as float32."""
    stored: dict[str, NDArray[Any]] = dict(float_weights(model))
    if weight_type == "f32":
        return stored
    kind = GGUF_TYPES[weight_type]
    for name, values in stored.items():
        if values.ndim == 1:
            continue
        if weight_type.endswith("_k"):  # the gguf package quantizes no K formats: any bytes are valid blocks
            stored[name] = random_blocks(weight_type, values.shape, INITIALIZER_RANGE, _random(model, name))
        else:
            stored[name] = gguf.quantize(values, kind)
    return stored


def effective_weights(model: Tiny, weight_type: str) -> dict[str, Array]:
    """The float32 values that an engine computes with when the file is of `weight_type`."""
    effective = {}
    for name, values in stored_weights(model, weight_type).items():
        quantized = weight_type != "f32" and values.ndim > 1
        effective[name] = (gguf.dequantize(values, GGUF_TYPES[weight_type]) if quantized else values).astype(np.float32)
    return effective


def weights_digest(weights: dict[str, Array]) -> str:
    """SHA-256 over names and float32 values: references are only valid for the weights they were recorded with."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + weights[name].tobytes())
    return total.hexdigest()


def write(name: str, checkpoint_format: str, folder: Path) -> Path:
    """Write one checkpoint below `folder`; the path to give to an engine (a directory, or a .gguf file)."""
    model = MODELS[name]
    kind, _, detail = checkpoint_format.partition("-")
    target = folder / f"tiny-{name}-{checkpoint_format}"
    target.mkdir(parents=True)
    if kind == "gguf":
        path = target / f"tiny-{name}-{detail}.gguf"
        write_gguf(model, stored_weights(model, detail), detail, path)
        return path
    if kind != "safetensors":
        raise ValueError(f"checkpoint format {checkpoint_format!r}: expected safetensors[-...] or gguf-TYPE")
    dtype = "f32" if detail in ("", "sharded") else detail
    write_safetensors(model, stored_weights(model, dtype), dtype, target, shards=3 if detail == "sharded" else 1)
    return target


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    wanted = sys.argv[2:] or [f"{name}:{kind}" for name in MODELS for kind in ("safetensors", "gguf-f32")]
    for item in wanted:
        name, _, checkpoint_format = item.partition(":")
        print(write(name, checkpoint_format or "safetensors", Path(sys.argv[1])))


if __name__ == "__main__":
    main()
