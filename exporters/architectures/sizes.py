"""Sizes and common options of decoder configs, from config.json and from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.hf_config import ConfigReader
from ..checkpoint.tensors import Checkpoint
from ..errors import UnsupportedError

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_POSITIONS = 1 << 31


@dataclass(frozen=True, slots=True)
class Sizes:
    """Names and meanings as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


def sizes_from_config(reader: ConfigReader, *, default_head_dim: int | None = None) -> Sizes:
    """num_key_value_heads defaults to num_attention_heads, head_dim to `default_head_dim` or hidden_size / heads."""
    heads, hidden = reader.integer("num_attention_heads", high=MAX_HEADS), reader.integer("hidden_size")
    if default_head_dim is None:
        default_head_dim = _head_dim(reader, "head_dim", hidden, heads)
    kv_heads = reader.integer("num_key_value_heads", heads, high=MAX_HEADS)
    head_dim = reader.integer("head_dim", default_head_dim, low=2, high=MAX_HEADS)
    _check_heads(reader, heads, ("num_key_value_heads", kv_heads), ("head_dim", head_dim))
    return Sizes(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=reader.integer("num_hidden_layers", high=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=reader.integer("max_position_embeddings", high=MAX_POSITIONS),
    )


def sizes_from_gguf(reader: ConfigReader, checkpoint: Checkpoint) -> Sizes:
    """The vocabulary's size comes from the embedding's shape if no key says it."""
    heads, hidden = reader.integer("attention.head_count", high=MAX_HEADS), reader.integer("embedding_length")
    default_head_dim = _head_dim(reader, "attention.key_length", hidden, heads)
    head_dim = reader.integer("attention.key_length", default_head_dim, low=2, high=MAX_HEADS)
    kv_heads = reader.integer("attention.head_count_kv", heads, high=MAX_HEADS)
    _check_heads(reader, heads, ("attention.head_count_kv", kv_heads), ("attention.key_length", head_dim))
    reader.must_equal("attention.value_length", head_dim)
    reader.must_equal("rope.dimension_count", head_dim)
    embedding = checkpoint.tensors.get("token_embd.weight")
    return Sizes(
        vocab_size=reader.integer("vocab_size", embedding.shape[0] if embedding else None),
        hidden_size=hidden,
        intermediate_size=reader.integer("feed_forward_length"),
        num_hidden_layers=reader.integer("block_count", high=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=reader.integer("context_length", high=MAX_POSITIONS),
    )


def _head_dim(reader: ConfigReader, name: str, hidden: int, heads: int) -> int:
    if not reader.has(name) and hidden % heads:
        raise reader.fail(name, f"an integer, since the hidden size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _check_heads(reader: ConfigReader, heads: int, kv_heads: tuple[str, int], head_dim: tuple[str, int]) -> None:
    if heads % kv_heads[1]:
        raise reader.fail(kv_heads[0], f"a divisor of the {heads} attention heads")
    if head_dim[1] % 2:
        raise reader.fail(head_dim[0], "an even number")


def windows_of_layer_types(reader: ConfigReader, types: list[str], window: int) -> tuple[int, ...]:
    """Per layer: the window, or 0 for full attention."""
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f"{reader.where}: layer_types holds {kind!r}, expected full_attention or sliding_attention"
            )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def optional_windows(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Qwen: use_sliding_window switches windows on, for layer_types or for the layers from max_window_layers on."""
    types = reader.strings("layer_types", num_layers)
    window = reader.integer("sliding_window", 4096, high=MAX_POSITIONS)
    first = reader.integer("max_window_layers", 28, low=0)
    if not reader.boolean("use_sliding_window", False) or reader.raw("sliding_window") is None:
        if types is not None and "sliding_attention" in types:
            raise reader.fail("layer_types", "full_attention everywhere, since use_sliding_window is off")
        return windows_of_layer_types(reader, types or [], 0)
    if types is None:
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return windows_of_layer_types(reader, types, window)


def refuse_common_options(reader: ConfigReader) -> None:
    """Refuse options of config.json that change the computation and that we do not have."""
    quantization = reader.section("quantization_config")
    if quantization is not None:
        method = quantization.raw("quant_method")
        raise UnsupportedError(
            f"{reader.where}: quantization_config with quant_method {method!r} is not supported; "
            f"use an unquantised checkpoint or a GGUF file"
        )
    reader.must_equal("is_encoder_decoder", False)
    reader.must_equal("add_cross_attention", False)
    reader.must_equal("use_bidirectional_attention", False)
    reader.must_equal("num_experts", 0)
    reader.must_equal("num_local_experts", 0)


def refuse_common_gguf_options(reader: ConfigReader) -> None:
    """The same for GGUF; a key of the architecture that nobody read is refused, too, so call it last."""
    reader.must_equal("expert_count", 0)
    reader.must_equal("expert_used_count", 0)
    reader.must_equal("attention.causal", True)
    reader.must_equal("pooling_type", 0)
    reader.must_equal("use_parallel_residual", False)
    if unread := reader.unread():
        value = repr(reader.values[unread[0]])[:100]
        raise UnsupportedError(f"{reader.where}: the key {unread[0]} = {value} is not known, so it cannot be honoured")
