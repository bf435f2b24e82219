"""Block pool and KV manager do what vLLM's do, on the operations recorded by tests/tools/record_vllm_traces.py."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from trivet.backends.contract.manifest import KVCacheSpec
from trivet.runtime.kv_cache.block_hash import make_block_hasher
from trivet.runtime.kv_cache.block_pool import BlockPool
from trivet.runtime.kv_cache.manager import KVCacheManager
from trivet.runtime.kv_cache.sizing import KVSizingRequest, plan_kv_cache
from trivet.runtime.request import Request, RequestStatus
from trivet.runtime.sampling_params import SamplingParams

TRACES = Path(__file__).parents[2] / "data" / "vllm_traces"


def free_queue_crc(pool: BlockPool) -> int:
    return zlib.crc32(",".join(map(str, pool.free_block_queue.ids())).encode())


def apply_pool_op(pool: BlockPool, op: str, argument: Any) -> Any:
    if op == "new":
        return [b.block_id for b in pool.get_new_blocks(argument)]
    if op == "free":
        return pool.free_blocks([pool.blocks[i] for i in argument])
    if op == "touch":
        return pool.touch([pool.blocks[i] for i in argument])
    if op == "cache":
        ids, content = argument
        return pool.cache_full_blocks([pool.blocks[i] for i in ids], [str(c).encode() for c in content])
    if op == "lookup":
        hit = pool.get_cached_block(str(argument).encode())
        return None if hit is None else hit.block_id
    return pool.reset_prefix_cache()


@pytest.mark.parametrize("name", ["small", "large"])
def test_block_pool(name: str) -> None:
    trace = json.loads((TRACES / f"pool_{name}.json").read_text())
    workload = trace["workload"]
    pool = BlockPool(workload["num_gpu_blocks"], enable_caching=True)
    for number, ((op, argument), expected) in enumerate(zip(workload["ops"], trace["facts"], strict=True)):
        fact = apply_pool_op(pool, op, argument)
        assert [fact, free_queue_crc(pool), round(pool.get_usage(), 6)] == expected, f"op {number}: {op} {argument}"
        pool.check_integrity()


def allocate(manager: KVCacheManager, request: Request, op: dict[str, Any]) -> Any:
    hits, num_hits = manager.get_computed_blocks(request) if request.num_computed_tokens == 0 else ([], 0)
    wanted = min(op["num_new_tokens"], request.num_tokens - request.num_computed_tokens - num_hits)
    if wanted < 1:
        return "done"
    options = ("num_lookahead_tokens", "full_sequence_must_fit", "reserved_blocks", "has_scheduled_reqs")
    blocks = manager.allocate_slots(request, wanted, new_computed_blocks=hits, **{name: op[name] for name in options})
    if blocks is None:
        return None
    request.num_computed_tokens += num_hits + wanted
    request.status = RequestStatus.RUNNING
    return [num_hits, manager.get_block_ids(request.request_id)]


@pytest.mark.parametrize("name", ["cached", "uncached", "watermark"])
def test_kv_cache_manager(name: str) -> None:
    trace = json.loads((TRACES / f"manager_{name}.json").read_text())
    w = trace["workload"]
    manager = KVCacheManager(
        num_gpu_blocks=w["num_gpu_blocks"],
        block_size=w["block_size"],
        max_model_len=w["max_model_len"],
        enable_caching=w["enable_prefix_caching"],
        watermark=w["watermark"],
    )
    requests = {r["id"]: Request(r["id"], r["prompt"], SamplingParams()) for r in w["requests"]}
    for request in requests.values():
        request.set_block_hasher(make_block_hasher(w["block_size"]))
    refused = 0
    for number, (op, expected) in enumerate(zip(w["ops"], trace["facts"], strict=True)):
        request = requests[op["id"]]
        fact = None
        if op["op"] == "free":
            manager.free(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED
        else:
            fact = allocate(manager, request, op)
            refused += fact is None
        assert [fact, free_queue_crc(manager.block_pool)] == expected, f"op {number}: {op}"
        manager.check_integrity()
    assert refused > 10


def test_number_of_blocks() -> None:
    trace = json.loads((TRACES / "sizing_blocks.json").read_text())
    for case, expected in zip(trace["workload"]["cases"], trace["facts"], strict=True):
        heads, dim = case["num_kv_heads"], case["head_dim"]
        request = KVSizingRequest(
            kv_cache_specs=[
                KVCacheSpec(layer=i, num_kv_heads=heads, head_dim=dim, kv_offset=2 * heads * dim * i)
                for i in range(case["num_layers"])
            ],
            block_size=case["block_size"],
            cache_dtype=case["dtype"],
            model_max_len=case["max_model_len"],
            max_model_len=None,
            num_gpu_blocks_override=case["num_gpu_blocks_override"],
            kv_cache_memory_bytes=case["budget"],
            gpu_memory_utilization=None,
            weight_bytes=0,
        )
        assert plan_kv_cache(request, free_bytes=0, environ={}).num_gpu_blocks == expected, case
