#!/usr/bin/env python3
"""Speed of whole models with random weights on a CUDA device, at the level of a session: no tokenizer, no scheduler.

    bench_cuda_model.py [SHAPE:FORMAT | FILE.gguf ...]        e.g. 1b:q4_k 8b:q8_0

Prints one JSON object per model: seconds to load, tokens/s of a 2048-token prompt and of decoding 1 and 64 sequences,
the weight bytes that decoding one sequence reads per second beside the speed of a copy, the products of a prompt.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import tiny_writers
from numpy.typing import NDArray
from tiny_checkpoints import Tiny, tensor_shapes
from tiny_tokenizers import Vocabulary, sentencepiece_bpe
from trivet.backends.contract.formats import FORMATS
from trivet.backends.contract.manifest import read_manifest
from trivet.backends.cuda.device import CudaDevice
from trivet.backends.session import ModelSession
from trivet.exporters import export
from trivet.exporters.checkpoint import open_checkpoint
from verify_cuda import copy_speed

BLOCK_SIZE = 16
PROMPT = 2048
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tied": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def wide_vocabulary(model: Tiny) -> Vocabulary:
    """A small vocabulary, filled up with tokens that no text produces."""
    base = sentencepiece_bpe(384)
    extra = tuple(f"<extra_{i}>" for i in range(model.vocab_size - len(base.tokens)))
    scores = (*base.scores, *(-1e6 for _ in extra))
    return Vocabulary("spm", (*base.tokens, *extra), base.merges, base.specials, base.bos, base.eos, scores)


def random_rows(fmt: str, shape: tuple[int, int], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of random integers with scales of one size; parts repeat, which costs less time and no bandwidth less."""
    row_bytes = FORMATS[fmt].row_bytes(shape[1])
    part = min(shape[0], max(1, (32 << 20) // row_bytes))
    if fmt.endswith("_k"):
        rows = tiny_writers.random_blocks(fmt, (part, shape[1]), 0.02, np.random.RandomState(0))
    elif fmt == "bf16":
        values = 0.02 * rng.standard_normal((part, shape[1]), np.float32)
        rows = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        spec = FORMATS[fmt]
        blocks = rng.integers(0, 256, (part, shape[1] // spec.block_size, spec.block_bytes), np.uint8)
        blocks[:, :, :2] = np.array([0.0003], np.float16).view(np.uint8)
        rows = blocks.reshape(part, -1)
    return np.resize(rows, (shape[0], row_bytes))


@dataclass(frozen=True, slots=True)
class Read:
    """What a token reads: the embedding counts where it is the head too."""

    num_bytes: int
    num_weights: int  # of the layers alone


def make_package(shape: str, fmt: str, folder: Path) -> tuple[Path, Read]:
    """A new package with random weights."""
    model = Tiny(name=shape, family="llama", vocab_size=128256, max_position_embeddings=8192, **SHAPES[shape])
    rng = np.random.default_rng(0)
    weights: dict[str, NDArray[Any]] = {}
    read = weights_of_layers = 0
    for name, extents in tensor_shapes(model).items():
        if len(extents) == 1:
            weights[name] = np.ones(extents, np.float32)
            continue
        weights[name] = random_rows(fmt, (extents[0], extents[1]), rng)
        if name != "model.embed_tokens.weight" or model.tied:
            read += weights[name].nbytes
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            weights_of_layers += extents[0] * extents[1]
        if fmt == "bf16":
            weights[name] = weights[name].view(np.uint16)
    path = folder / f"{shape}-{fmt}.gguf"
    tiny_writers.vocabulary_of = wide_vocabulary
    tiny_writers.interleave_heads = lambda values, num_heads: values
    tiny_writers.write_gguf(model, weights, fmt, path)
    return export(path, folder / f"{shape}-{fmt}", verify=False), Read(read, weights_of_layers)


def step(tokens: int, computed: int, batch: int, width: int) -> dict[str, NDArray[Any]]:
    """`batch` requests with `tokens` scheduled tokens each; request r has the blocks from 1 + r * width."""
    positions = np.tile(np.arange(computed, computed + tokens, dtype=np.int32), batch)
    first = np.repeat(1 + np.arange(batch, dtype=np.int32) * width, tokens)
    slots = (first + positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    used = -(-(computed + tokens) // BLOCK_SIZE)
    inputs: dict[str, NDArray[Any]] = {
        "input_ids": np.random.default_rng(computed).integers(300, 128000, batch * tokens).astype(np.int32),
        "positions": positions,
        "slot_mapping": slots.astype(np.int32),
        "block_table": (1 + np.arange(batch)[:, None] * width + np.arange(used)).astype(np.int32),
        "query_start_loc": np.arange(batch + 1, dtype=np.int32) * np.int32(tokens),
        "seq_lens": np.full(batch, computed + tokens, np.int32),
        "logits_indices": (np.arange(1, batch + 1) * tokens - 1).astype(np.int32),
        "sampling_floats": np.tile(np.array([0, 1, 0, 1, 0, 0], np.float32), (batch, 1)),
        "sampling_ints": np.tile(np.array([0, 0, 0, -1, -1, 0], np.int64), (batch, 1)),
        "bitmask": np.zeros((0, 0), np.int32),
        "max_num_logprobs": np.array(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
    }
    for name in ("token_history", "allowed_token_ids", "banned_token_ids", "bias_token_ids"):
        inputs[name] = np.zeros(0, np.int32)
    for name in ("token_history_loc", "allowed_token_ids_loc", "banned_token_ids_loc", "bias_loc"):
        inputs[name] = np.zeros(batch + 1, np.int32)
    return inputs


def median_seconds(run: Callable[[dict[str, NDArray[Any]]], Any], steps: list[dict[str, NDArray[Any]]]) -> float:
    """Arrays whose shape stays are the same objects in every step, as the engine's runner keeps them."""
    times: list[float] = []
    kept: dict[str, NDArray[Any]] = {}
    for inputs in steps:
        for name, value in inputs.items():
            if name in kept and kept[name].shape == value.shape:
                kept[name][...] = value
            else:
                kept[name] = value.copy()
        started = time.perf_counter()
        run(kept)
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def file_package(file: Path, folder: Path) -> tuple[Path, Read]:
    """The package of a GGUF file that is there."""
    checkpoint = open_checkpoint(file)
    matrices = {name: tensor for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    table = matrices.pop("token_embd.weight")
    head = matrices.pop("output.weight", table)
    layers = matrices.values()
    read = Read(head.nbytes + sum(t.nbytes for t in layers), sum(t.num_elements for t in layers))
    checkpoint.close()
    return export(file, folder / file.stem, verify=False), read


def copy_bytes_per_second() -> float:
    device = CudaDevice(0)
    try:
        return copy_speed(device)
    finally:
        device.close()


def measure(package: Path, read: Read) -> dict[str, Any]:
    copy = copy_bytes_per_second()
    started = time.perf_counter()
    session = ModelSession(package, read_manifest(package), device="cuda")
    load = time.perf_counter() - started
    width = 160
    session.allocate_kv_cache(num_blocks=64 * width + 1, block_size=BLOCK_SIZE, dtype="float16")

    def run(inputs: dict[str, NDArray[Any]]) -> Any:
        return session.run(inputs, ["sampled_token_ids"])

    prompt = step(PROMPT, 0, 1, width)
    median_seconds(run, [prompt] * 2)
    prefill = median_seconds(run, [prompt] * 5)
    alone = [step(1, 512 + i, 1, width) for i in range(60)]
    median_seconds(run, alone[:5])
    single = median_seconds(run, alone)
    run(step(256, 0, 8, width))
    many = [step(1, 256 + i, 64, width) for i in range(30)]
    median_seconds(run, many[:5])
    batch = median_seconds(run, many)
    session.close()
    return {
        "weight_gb": read.num_bytes / 1e9,
        "load_s": load,
        "prefill_tokens_per_s": PROMPT / prefill,
        "prefill_tflops": 2 * read.num_weights * PROMPT / prefill / 1e12,
        "decode_ms": single * 1e3,
        "decode_tokens_per_s": 1 / single,
        "decode_gb_per_s": read.num_bytes / single / 1e9,
        "copy_gb_per_s": copy / 1e9,
        "decode_64_ms": batch * 1e3,
        "decode_64_tokens_per_s": 64 / batch,
    }


def main() -> None:
    for item in sys.argv[1:] or ["1b:q4_k", "8b:q4_k"]:
        with tempfile.TemporaryDirectory() as folder:
            if item.endswith(".gguf"):
                package, read = file_package(Path(item).resolve(), Path(folder))
            else:
                shape, _, fmt = item.partition(":")
                package, read = make_package(shape, fmt, Path(folder))
            print(json.dumps({"model": item, **measure(package, read)}), flush=True)


if __name__ == "__main__":
    main()
