"""Time per call of PagedAttention, RMSNorm, AddRMSNorm, RotaryTable and Sample at the shapes of real models.

    python tests/tools/bench_attention.py [--tier TIER] [--threads N] [--kv-dtype DTYPE] [--seconds S]

Prints the median over calls through onnxruntime with bound inputs and outputs, so that overheads are part of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from reference_attention import AttentionShape, rotary_table
from reference_sample import Row, sample_inputs, sample_outputs
from single_op import available_tiers, bound_op
from trivet.backends.contract.opset import KV_DTYPES

Array = NDArray[Any]

MODELS = {  # (num_heads, num_kv_heads, head_dim)
    "SmolLM2-135M": (9, 3, 64),
    "Qwen2.5-0.5B": (14, 2, 64),
    "Gemma-3-270M": (4, 1, 256),
    "Llama-3-8B": (32, 8, 128),
}
STEPS = ((512, 512), (2048, 2048), (64, 2048), (1, 128), (1, 1024), (1, 8192))  # (scheduled tokens, keys)


@dataclass(frozen=True, slots=True)
class Settings:
    tier: str
    threads: int
    kv_dtype: str
    seconds: float  # per case


def measure(settings: Settings, op: str, inputs: dict[str, Array], outputs: dict[str, Any], **options: Any) -> float:
    """Median seconds per call."""
    call, _ = bound_op(op, inputs, outputs=outputs, tier=settings.tier, num_threads=settings.threads, **options)
    call()
    times: list[float] = []
    while len(times) < 5 or sum(times) < settings.seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def attention_inputs(shape: AttentionShape, tokens: int, keys: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    blocks = -(-keys // shape.block_size)
    positions = np.arange(keys - tokens, keys, dtype=np.int32)
    table = np.arange(1, blocks + 1, dtype=np.int32)[None]
    cache = np.zeros((blocks + 1, shape.block_size * shape.token_bytes), np.uint8)
    return {
        "qkv": rng.standard_normal((tokens, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim), np.float32),
        "kv_cache": cache,
        "kv_layout": np.array([KV_DTYPES[shape.kv_dtype].code, shape.block_size], np.int32),
        "cos_sin": rotary_table(positions, np.ones(shape.head_dim // 2), 1.0).astype(np.float32),
        "positions": positions,
        "slot_mapping": table[0, positions // shape.block_size] * shape.block_size + positions % shape.block_size,
        "block_table": table,
        "query_start_loc": np.array([0, tokens], np.int32),
        "seq_lens": np.array([keys], np.int32),
    }


def bench_attention(settings: Settings) -> None:
    for model, (heads, kv_heads, head_dim) in MODELS.items():
        shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, kv_dtype=settings.kv_dtype)
        for tokens, keys in STEPS:
            inputs = attention_inputs(shape, tokens, keys)
            outputs = {"out": (tokens, heads * head_dim), "kv_cache_out": inputs["kv_cache"].shape}
            seconds = measure(
                settings,
                "PagedAttention",
                inputs,
                outputs,
                attributes=shape.attributes(),
                aliases={"kv_cache_out": "kv_cache"},
            )
            pairs = tokens * (keys - tokens) + tokens * (tokens + 1) // 2
            rate = 4 * pairs * heads * head_dim / seconds / 1e9
            name = f"PagedAttention {model}, {tokens} of {keys}"
            print(f"{name:48} {seconds * 1e6:10.1f} us  {rate:7.1f} GFLOP/s", flush=True)


def bench_rows(settings: Settings) -> None:
    rng = np.random.default_rng(0)
    for tokens in (1, 512):
        x = rng.standard_normal((tokens, 576), np.float32)
        add = {"x": x, "residual": x.copy(), "weight": x[0]}
        cases: dict[str, tuple[dict[str, Array], dict[str, Any], dict[str, float]]] = {
            "RMSNorm": ({"x": x, "weight": x[0]}, {"y": x.shape}, {"eps": 1e-5}),
            "AddRMSNorm": (add, {"y": x.shape, "residual_out": x.shape}, {"eps": 1e-5}),
            "RotaryTable": (
                {"positions": np.arange(tokens, dtype=np.int32), "inv_freq": np.ones(32, np.float32)},
                {"cos_sin": (tokens, 64)},
                {"scale": 1.0},
            ),
        }
        for op, (inputs, outputs, attributes) in cases.items():
            seconds = measure(settings, op, inputs, outputs, attributes=attributes)
            print(f"{f'{op} {tokens} x {next(iter(outputs.values()))[1]}':48} {seconds * 1e6:10.1f} us", flush=True)


def bench_sample(settings: Settings) -> None:
    rng = np.random.default_rng(0)
    rows = {
        "greedy": Row(),
        "greedy, 20 logprobs": Row(num_logprobs=20),
        "temperature": Row(1.0),
        "top_k 50": Row(0.8, top_k=50),
        "top_p 0.95": Row(0.8, top_p=0.95),
        "repetition penalty": Row(repetition_penalty=1.1, prompt=list(range(1000)), output=list(range(500, 900))),
    }
    for vocab in (49152, 151936):
        logits = (rng.standard_normal((1, vocab)) * 3).astype(np.float32)
        for name, row in rows.items():
            most = max(row.num_logprobs, 0)
            inputs = sample_inputs(logits, [row], most)
            seconds = measure(settings, "Sample", inputs, sample_outputs(1, most))
            print(f"{f'Sample {name}, vocabulary {vocab}':48} {seconds * 1e6:10.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=available_tiers(), default=available_tiers()[-1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-dtype", choices=list(KV_DTYPES), default="float16")
    parser.add_argument("--seconds", type=float, default=0.3, help="per case")
    args = parser.parse_args()
    settings = Settings(args.tier, args.threads, args.kv_dtype, args.seconds)
    print(settings)
    bench_attention(settings)
    bench_rows(settings)
    bench_sample(settings)


if __name__ == "__main__":
    main()
