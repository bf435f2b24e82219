"""GGUF files with random weights in the shapes of published models: speed depends on shapes and formats, not on values.

    python bench/random_gguf.py --shape qwen3-0.6b --format q4_0 --out qwen3-0.6b-random-q4_0.gguf

Needs numpy and gguf. Formats are mixed as llama.cpp's quantizer mixes them; the vocabulary has the right size, but only
byte tokens and a few pairs of letters mean anything. Files take their final name when they are whole.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_DEVIATION = 0.02  # of the weights: what models are initialised with
_PAIRS = "etaoinshrdlu"  # letters whose pairs become tokens


@dataclass(frozen=True, slots=True)
class ModelShape:
    architecture: str  # GGUF's name of the family
    pre_tokenizer: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    rope_base: float
    rms_eps: float
    qk_norm: bool
    tied: bool = True  # the head is the embedding table


SHAPES = {
    "qwen3-0.6b": ModelShape("qwen3", "qwen2", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, 1e-6, True),
    "llama3.2-1b": ModelShape("llama", "llama-bpe", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, 1e-5, False),
    "qwen3-4b": ModelShape("qwen3", "qwen2", 36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e6, 1e-6, True),
    "llama3.1-8b": ModelShape(
        "llama", "llama-bpe", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, 1e-5, False, tied=False
    ),
}
FORMATS = ("q4_0", "q8_0", "q4_k_m", "bf16")
_FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15, "bf16": 32}  # llama.cpp's numbers of the mixes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args(argv)
    write_model(SHAPES[args.shape], args.format, args.out, name=f"random {args.shape}", seed=args.seed)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.0f} MB")
    return 0


def write_model(shape: ModelShape, mix: str, path: Path, *, name: str, seed: int = 0) -> None:
    """The file `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, shape.architecture)
    _add_metadata(writer, shape, mix, name)
    _add_vocabulary(writer, shape)
    rng = np.random.default_rng(seed)
    for tensor, rows, columns, kind in _tensors(shape, mix):
        if kind == "f32":
            writer.add_tensor(tensor, np.ones(columns, dtype=np.float32))
        else:
            quantization = getattr(gguf.GGMLQuantizationType, kind.upper())
            writer.add_tensor(tensor, random_rows(kind, rows, columns, rng), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


# --- weights ----------------------------------------------------------------------------------------------------------
def _tensors(shape: ModelShape, mix: str) -> list[tuple[str, int, int, str]]:
    """(name, rows, columns, format) of every tensor."""
    wide = mix if mix in ("q8_0", "bf16") else "q6_k"  # what the head is kept in
    body = "q4_k" if mix == "q4_k_m" else mix
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = [("token_embd.weight", shape.vocabulary, shape.hidden, wide if shape.tied else body)]
    if not shape.tied:
        tensors.append(("output.weight", shape.vocabulary, shape.hidden, wide))
    for layer in range(shape.layers):
        better = wide if mix == "q4_k_m" and _keeps_more_bits(layer, shape.layers) else body
        matrices = [
            ("attn_q", queries, shape.hidden, body),
            ("attn_k", keys, shape.hidden, body),
            ("attn_v", keys, shape.hidden, better),
            ("attn_output", shape.hidden, queries, body),
            ("ffn_gate", shape.intermediate, shape.hidden, body),
            ("ffn_up", shape.intermediate, shape.hidden, body),
            ("ffn_down", shape.hidden, shape.intermediate, better),
            ("attn_norm", 1, shape.hidden, "f32"),
            ("ffn_norm", 1, shape.hidden, "f32"),
        ]
        if shape.qk_norm:
            matrices += [("attn_q_norm", 1, shape.head_dim, "f32"), ("attn_k_norm", 1, shape.head_dim, "f32")]
        tensors += [(f"blk.{layer}.{tensor}.weight", *rest) for tensor, *rest in matrices]  # type: ignore[misc]
    return [*tensors, ("output_norm.weight", 1, shape.hidden, "f32")]


def _keeps_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's choice for Q4_K_M: the first and last eighth of the layers, and every third one between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def random_rows(kind: str, rows: int, columns: int, rng: np.random.Generator) -> Bytes:
    """uint8 [rows, bytes of a row] of blocks whose weights have mean 0 and about the standard deviation 0.02."""
    block_size, block_bytes, fill = _BLOCKS[kind]
    blocks = rng.integers(0, 256, (rows * (columns // block_size), block_bytes), dtype=np.uint8)
    fill(blocks)
    return blocks.reshape(rows, -1)


def _half(value: float) -> Bytes:
    return np.array([value], dtype="<f2").view(np.uint8)


def _q4_0(blocks: Bytes) -> None:
    blocks[:, 0:2] = _half(_DEVIATION / 4.6)  # deviation of 0..15


def _q8_0(blocks: Bytes) -> None:
    blocks[:, 0:2] = _half(_DEVIATION / 74)
    quants = blocks[:, 2:]
    quants[quants == 128] = 129  # -128, which no quantizer writes


def _q4_k(blocks: Bytes) -> None:
    """Scales and minimums are uniform in 0..63; minimums are 7.5 times as large, so that the mean is 0."""
    blocks[:, 0:2], blocks[:, 2:4] = _half(_DEVIATION / 258), _half(7.5 * _DEVIATION / 258)


def _q6_k(blocks: Bytes) -> None:
    blocks[:, 208:210] = _half(_DEVIATION / 1367)  # scales are uniform in -128..127


def _bf16(blocks: Bytes) -> None:
    values = _DEVIATION * np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    blocks.view(np.uint16)[:] = (values.view(np.uint32) >> 16).astype(np.uint16)[blocks.view(np.uint16)]


_BLOCKS: dict[str, tuple[int, int, Callable[[Bytes], None]]] = {  # weights of a block, its bytes, its scales
    "q4_0": (32, 18, _q4_0),
    "q8_0": (32, 34, _q8_0),
    "q4_k": (256, 144, _q4_k),
    "q6_k": (256, 210, _q6_k),
    "bf16": (1, 2, _bf16),
}


# --- metadata ---------------------------------------------------------------------------------------------------------
def _add_metadata(writer: Any, shape: ModelShape, mix: str, name: str) -> None:
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[mix])
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_vocab_size(shape.vocabulary)


def _add_vocabulary(writer: Any, shape: ModelShape) -> None:
    """Byte tokens, pairs of letters, unused tokens up to the size, and an end token."""
    tokens = [*_byte_characters(), *(a + b for a in _PAIRS for b in _PAIRS)]
    merges = [f"{a} {b}" for a in _PAIRS for b in _PAIRS]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    unused = shape.vocabulary - len(tokens) - 1
    tokens += [f"<unused{index}>" for index in range(unused)] + ["<|end|>"]
    types += [gguf.TokenType.NORMAL] * unused + [gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(shape.vocabulary - 1)
    writer.add_eos_token_id(shape.vocabulary - 1)
    writer.add_add_bos_token(False)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in plain else next(moved)) for byte in range(256)]


if __name__ == "__main__":
    sys.exit(main())
