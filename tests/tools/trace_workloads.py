"""Seeded workloads that record_vllm_traces.py runs through vLLM. They are stored with the traces."""

from __future__ import annotations

import random
import zlib
from typing import Any

EOS_TOKEN_ID = 2
STOP_TOKEN_ID = 3


def sampled_token(seed: int, request_id: str, index: int) -> int:
    """The token a request "samples" at output position `index`; small ids, so that eos and stop ids come up."""
    return zlib.crc32(f"{seed}/{request_id}/{index}".encode()) % 60


def _random_request(
    rng: random.Random,
    name: str,
    *,
    shared: list[list[int]],
    prompt_len: tuple[int, int],
    max_tokens: tuple[int, int],
    spread: int,
    abort_share: float,
    eos: bool,
    extras: bool,
) -> dict[str, Any]:
    length = rng.randint(*prompt_len)
    prompt = [rng.randrange(10, 60) for _ in range(length)]
    if shared and rng.random() < 0.8:
        keep = rng.randint(0, length)
        prompt[:keep] = rng.choice(shared)[:keep]
    request: dict[str, Any] = {
        "id": name,
        "prompt": prompt,
        "max_tokens": rng.randint(*max_tokens),
        "eos_token_id": EOS_TOKEN_ID if eos else 1000,
        "add_at": rng.randrange(spread),
    }
    if rng.random() < abort_share:
        request["abort_at"] = request["add_at"] + rng.randrange(1, 20)
    if extras:
        request["ignore_eos"] = rng.random() < 0.3
        request["min_tokens"] = rng.randint(0, request["max_tokens"]) if rng.random() < 0.3 else 0
        request["stop_token_ids"] = [STOP_TOKEN_ID, 5] if rng.random() < 0.5 else None
        request["cache_salt"] = rng.choice([None, None, "a", "b"])
        request["prompt_logprobs"] = 1 if rng.random() < 0.15 else None
    return request


def scheduler_workload(
    seed: int,
    *,
    num_requests: int,
    num_gpu_blocks: int,
    budget: int,
    prompt_len: tuple[int, int],
    max_tokens: tuple[int, int],
    max_num_seqs: int = 8,
    block_size: int = 4,
    max_model_len: int = 96,
    caching: bool = True,
    prefixes: int = 0,
    spread: int = 10,
    num_steps: int = 150,
    abort_share: float = 0.0,
    eos: bool = False,
    extras: bool = False,
    **scheduler_config: Any,
) -> dict[str, Any]:
    """`prefixes` shared prompt starts, arrivals spread over the first `spread` steps."""
    rng = random.Random(seed)
    shared = [[rng.randrange(10, 60) for _ in range(prompt_len[1])] for _ in range(prefixes)]
    requests = [
        _random_request(
            rng, f"r{i}", shared=shared, prompt_len=prompt_len, max_tokens=max_tokens, spread=spread,
            abort_share=abort_share, eos=eos, extras=extras,
        )
        for i in range(num_requests)
    ]  # fmt: skip
    return {
        "seed": seed,
        "block_size": block_size,
        "num_gpu_blocks": num_gpu_blocks,
        "max_model_len": max_model_len,
        "enable_prefix_caching": caching,
        "scheduler_config": {
            "max_num_batched_tokens": budget,
            "max_num_seqs": max_num_seqs,
            "enable_chunked_prefill": True,
            **scheduler_config,
        },
        "num_steps": num_steps,
        "requests": requests,
    }


def scheduler_workloads() -> dict[str, dict[str, Any]]:
    w = scheduler_workload
    short, long = (3, 12), (20, 60)
    return {
        "coschedule": w(1, num_requests=2, num_gpu_blocks=64, budget=64, prompt_len=(10, 20), max_tokens=(3, 6),
                        spread=1, num_steps=12),
        "chunked": w(2, num_requests=10, num_gpu_blocks=400, budget=16, prompt_len=long, max_tokens=(1, 12),
                     num_steps=90),
        "preempt_uncached": w(3, num_requests=8, num_gpu_blocks=20, budget=64, prompt_len=short, max_tokens=(20, 40),
                              caching=False, spread=1),
        "preempt_cached": w(4, num_requests=10, num_gpu_blocks=26, budget=48, prompt_len=(4, 24), max_tokens=(15, 40),
                            prefixes=2, num_steps=220),
        "no_full_reserve": w(5, num_requests=8, num_gpu_blocks=24, budget=12, prompt_len=long, max_tokens=(4, 20),
                             max_model_len=88, prefixes=1, scheduler_reserve_full_isl=False, num_steps=300),
        "watermark": w(6, num_requests=12, num_gpu_blocks=40, budget=64, prompt_len=(8, 30), max_tokens=(5, 30),
                       prefixes=2, watermark=0.2, num_steps=200),
        "long_prefill_threshold": w(7, num_requests=8, num_gpu_blocks=200, budget=32, prompt_len=long,
                                    max_tokens=(2, 10), long_prefill_token_threshold=7, num_steps=80),
        "unchunked": w(8, num_requests=10, num_gpu_blocks=120, budget=96, prompt_len=long, max_tokens=(2, 10),
                       enable_chunked_prefill=False, num_steps=60),
        "prefix_hits": w(9, num_requests=30, num_gpu_blocks=90, budget=64, prompt_len=(8, 48), max_tokens=(1, 8),
                         prefixes=3, spread=40, num_steps=110),
        "length_caps": w(10, num_requests=8, num_gpu_blocks=100, budget=40, prompt_len=(10, 30), max_tokens=(30, 60),
                         max_model_len=40, num_steps=60),
        "mixed": w(11, num_requests=40, num_gpu_blocks=48, budget=40, prompt_len=(2, 50), max_tokens=(1, 30),
                   max_num_seqs=6, prefixes=4, spread=120, abort_share=0.25, eos=True, extras=True, num_steps=320),
        "mixed_block16": w(12, num_requests=30, num_gpu_blocks=30, budget=128, prompt_len=(2, 150), max_tokens=(1, 60),
                           max_num_seqs=8, block_size=16, max_model_len=256, prefixes=3, spread=60, abort_share=0.1,
                           eos=True, extras=True, num_steps=320),
    }  # fmt: skip


def pool_workloads() -> dict[str, dict[str, Any]]:
    """The operations are drawn while recording, as they depend on the pool's state."""
    return {
        "small": {"seed": 21, "num_gpu_blocks": 9, "block_size": 4, "num_ops": 600},
        "large": {"seed": 22, "num_gpu_blocks": 60, "block_size": 4, "num_ops": 1500},
    }


def manager_workload(seed: int, *, num_gpu_blocks: int, caching: bool, watermark: float) -> dict[str, Any]:
    rng = random.Random(seed)
    base = [rng.randrange(10, 60) for _ in range(60)]
    requests = []
    for i in range(12):
        keep = rng.randint(0, 40)
        prompt = base[:keep] + [rng.randrange(10, 60) for _ in range(rng.randint(1, 20))]
        requests.append({"id": f"r{i}", "prompt": prompt, "max_tokens": 4, "eos_token_id": 1000})
    ops: list[dict[str, Any]] = []
    for _ in range(300):
        request_id = f"r{rng.randrange(12)}"
        if rng.random() < 0.3:
            ops.append({"op": "free", "id": request_id})
            continue
        ops.append({
            "op": "allocate",
            "id": request_id,
            "num_new_tokens": rng.randint(1, 30),
            "num_lookahead_tokens": rng.choice([0, 0, 0, 3]),
            "full_sequence_must_fit": rng.random() < 0.5,
            "reserved_blocks": rng.choice([0, 0, 5]),
            "has_scheduled_reqs": rng.random() < 0.7,
        })  # fmt: skip
    return {
        "seed": seed,
        "block_size": 4,
        "num_gpu_blocks": num_gpu_blocks,
        "max_model_len": 64,
        "enable_prefix_caching": caching,
        "watermark": watermark,
        "scheduler_config": {},
        "requests": requests,
        "ops": ops,
    }


def manager_workloads() -> dict[str, dict[str, Any]]:
    return {
        "cached": manager_workload(31, num_gpu_blocks=50, caching=True, watermark=0.0),
        "uncached": manager_workload(32, num_gpu_blocks=40, caching=False, watermark=0.0),
        "watermark": manager_workload(33, num_gpu_blocks=45, caching=True, watermark=0.15),
    }


def sizing_workloads() -> dict[str, dict[str, Any]]:
    rng = random.Random(41)
    cases = [
        {
            "num_layers": rng.choice([1, 2, 18, 24, 30]),
            "num_kv_heads": rng.choice([1, 2, 3, 8]),
            "head_dim": rng.choice([16, 64, 128, 256]),
            "block_size": rng.choice([8, 16, 32, 128]),
            "dtype": rng.choice(["float16", "float32"]),
            "budget": rng.randrange(10**9, 8 * 10**9),
            "max_model_len": rng.choice([128, 1024, 4096]),
            "num_gpu_blocks_override": rng.choice([None, None, None, 4000]),
        }
        for _ in range(40)
    ]
    return {"blocks": {"cases": cases}}
