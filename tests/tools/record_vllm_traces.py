"""Record what vLLM's scheduler, block pool and KV manager do on seeded workloads, and its configuration defaults.

Run with an interpreter that can import vllm 0.26.0 (its Python files and torch for CPU suffice):

    python tests/tools/record_vllm_traces.py

Writes tests/data/vllm_traces/*.json and tests/data/vllm_defaults.json: facts only (ids, counts), which
tests/unit/{scheduler,kv_cache}/test_vllm_traces.py replay and tests/unit/config/test_vllm_defaults.py compares.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import random
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trace_workloads import manager_workloads, pool_workloads, sampled_token, scheduler_workloads, sizing_workloads

DATA = Path(__file__).resolve().parent.parent / "data"


def vllm_config(w: dict[str, Any]) -> Any:
    from vllm.config import CacheConfig, ObservabilityConfig, SchedulerConfig

    cache_config = CacheConfig(block_size=w["block_size"], enable_prefix_caching=w["enable_prefix_caching"])
    cache_config.num_gpu_blocks = w["num_gpu_blocks"]
    scheduler_config = SchedulerConfig(
        max_model_len=w["max_model_len"], is_encoder_decoder=False, **w["scheduler_config"]
    )
    return SimpleNamespace(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            max_model_len=w["max_model_len"],
            is_diffusion=False,
            enable_return_routed_experts=False,
        ),
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        num_speculative_tokens=0,
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            data_parallel_rank=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        observability_config=ObservabilityConfig(),
        max_concurrent_batches=1,
        max_in_flight_tokens=scheduler_config.max_num_batched_tokens,
        use_v2_model_runner=False,
    )


def kv_cache_config(w: dict[str, Any]) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=w["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=w["num_gpu_blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


def make_request(w: dict[str, Any], r: dict[str, Any]) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    params = SamplingParams(
        max_tokens=r["max_tokens"],
        min_tokens=r.get("min_tokens", 0),
        ignore_eos=r.get("ignore_eos", False),
        stop_token_ids=r.get("stop_token_ids"),
        prompt_logprobs=r.get("prompt_logprobs"),
    )
    params.update_from_generation_config({}, r["eos_token_id"])
    hasher = get_request_block_hasher(w["block_size"], sha256) if w["enable_prefix_caching"] else None
    return Request(
        r["id"], r["prompt"], params, None, cache_salt=r.get("cache_salt"), block_hasher=hasher, arrival_time=0.0
    )


def free_queue_crc(block_pool: Any) -> int:
    ids = [b.block_id for b in block_pool.free_block_queue.get_all_free_blocks()]
    return zlib.crc32(",".join(map(str, ids)).encode())


def decisions(scheduler: Any, out: Any) -> dict[str, Any]:
    """What a call of schedule() decided."""
    tables = {i: list(scheduler.kv_cache_manager.get_block_ids(i)[0]) for i in out.num_scheduled_tokens}
    cached = out.scheduled_cached_reqs
    return {
        "scheduled": out.num_scheduled_tokens,
        "new": [n.req_id for n in out.scheduled_new_reqs],
        "resumed": [i for i in cached.req_ids if i in cached.resumed_req_ids],
        "finished": sorted(out.finished_req_ids),
        "running_after": [q.request_id for q in scheduler.running],
        "waiting_after": [q.request_id for q in scheduler.waiting],
        "blocks_crc": zlib.crc32(json.dumps(tables, sort_keys=True).encode()),
        "free_crc": free_queue_crc(scheduler.kv_cache_manager.block_pool),
    }


def record_scheduler(w: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    scheduler = Scheduler(
        vllm_config=vllm_config(w),
        kv_cache_config=kv_cache_config(w),
        structured_output_manager=SimpleNamespace(should_advance=lambda request: False),
        block_size=w["block_size"],
        mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda model_config: False),
        log_stats=True,
    )
    requests = {r["id"]: make_request(w, r) for r in w["requests"]}
    steps: list[dict[str, Any]] = []
    for number in range(w["num_steps"]):
        for r in w["requests"]:
            if r["add_at"] == number:
                scheduler.add_request(requests[r["id"]])
            if r.get("abort_at") == number:
                scheduler.finish_requests(r["id"], RequestStatus.FINISHED_ABORTED)
        before = {i: q.num_preemptions for i, q in requests.items()}
        out = scheduler.schedule()
        ids = list(out.num_scheduled_tokens)
        step = decisions(scheduler, out)
        step["preempted"] = sorted(i for i, q in requests.items() if q.num_preemptions > before[i])
        sampled = []
        for i in ids:
            q = requests[i]
            done = q.num_computed_tokens >= q.num_tokens
            sampled.append([sampled_token(w["seed"], i, q.num_output_tokens)] if done else [])
        result = scheduler.update_from_output(
            out,
            ModelRunnerOutput(
                req_ids=ids, req_id_to_index={i: k for k, i in enumerate(ids)}, sampled_token_ids=sampled
            ),
        )
        outputs = [o for group in result.values() for o in group.outputs]
        step["tokens"] = {o.request_id: o.new_token_ids for o in outputs}
        step["ended"] = {
            o.request_id: [str(o.finish_reason), o.stop_reason] for o in outputs if o.finish_reason is not None
        }
        step["free_crc_after"] = free_queue_crc(scheduler.kv_cache_manager.block_pool)
        steps.append(step)
    return steps


def draw_pool_op(rng: random.Random, pool: Any) -> tuple[str, Any]:
    """A valid operation on the pool as it is now."""
    held = [b.block_id for b in pool.blocks[1:] if b.ref_cnt > 0]
    cached = [b.block_id for b in pool.blocks[1:] if b.block_hash is not None]
    uncached = [b.block_id for b in pool.blocks[1:] if b.ref_cnt > 0 and b.block_hash is None]
    roll = rng.random()
    if roll < 0.35:
        return "new", rng.randint(0, pool.get_num_free_blocks() // 2 + pool.get_num_free_blocks() % 2)
    if roll < 0.6 and held:
        return "free", rng.sample(held, rng.randint(1, min(5, len(held))))
    if roll < 0.75 and cached:
        return "touch", rng.sample(cached, rng.randint(1, min(3, len(cached))))
    if roll < 0.9 and uncached:
        chosen = rng.sample(uncached, rng.randint(1, min(3, len(uncached))))
        return "cache", [chosen, [rng.randrange(12) for _ in chosen]]
    if roll < 0.97:
        return "lookup", rng.randrange(12)
    return "reset", None


def record_pool(w: dict[str, Any]) -> list[Any]:
    """Also stores the drawn operations in the workload."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash

    pool = BlockPool(w["num_gpu_blocks"], enable_caching=True, hash_block_size=w["block_size"])
    rng = random.Random(w["seed"])
    w["ops"] = []
    facts: list[Any] = []
    for _ in range(w["num_ops"]):
        op, argument = draw_pool_op(rng, pool)
        w["ops"].append([op, argument])
        fact: Any = None
        if op == "new":
            fact = [b.block_id for b in pool.get_new_blocks(argument)]
        elif op == "free":
            pool.free_blocks([pool.blocks[i] for i in argument])
        elif op == "touch":
            pool.touch([pool.blocks[i] for i in argument])
        elif op == "cache":
            block_ids, content = argument
            pool.cache_full_blocks(
                request=SimpleNamespace(block_hashes=[BlockHash(str(c).encode()) for c in content]),
                blocks=[pool.blocks[i] for i in block_ids],
                num_cached_blocks=0,
                num_full_blocks=len(block_ids),
                block_size=w["block_size"],
                kv_cache_group_id=0,
            )
        elif op == "lookup":
            hit = pool.get_cached_block(BlockHash(str(argument).encode()), [0])
            fact = None if hit is None else hit[0].block_id
        else:
            fact = pool.reset_prefix_cache()
        facts.append([fact, free_queue_crc(pool), round(pool.get_usage(), 6)])
    return facts


def record_manager(w: dict[str, Any]) -> list[Any]:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import RequestStatus

    manager = KVCacheManager(
        kv_cache_config=kv_cache_config(w),
        max_model_len=w["max_model_len"],
        scheduler_block_size=w["block_size"],
        hash_block_size=w["block_size"],
        enable_caching=w["enable_prefix_caching"],
        watermark=w["watermark"],
        log_stats=True,
    )
    requests = {r["id"]: make_request(w, r) for r in w["requests"]}
    facts: list[Any] = []
    for op in w["ops"]:
        request = requests[op["id"]]
        if op["op"] == "free":
            manager.free(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED
            facts.append([None, free_queue_crc(manager.block_pool)])
            continue
        hits, num_hits = None, 0
        if request.num_computed_tokens == 0:
            hits, num_hits, _ = manager.get_computed_blocks(request)
        wanted = min(op["num_new_tokens"], request.num_tokens - request.num_computed_tokens - num_hits)
        if wanted < 1:
            facts.append(["done", free_queue_crc(manager.block_pool)])
            continue
        blocks = manager.allocate_slots(
            request,
            wanted,
            num_new_computed_tokens=num_hits,
            new_computed_blocks=hits,
            num_lookahead_tokens=op["num_lookahead_tokens"],
            full_sequence_must_fit=op["full_sequence_must_fit"],
            reserved_blocks=op["reserved_blocks"],
            has_scheduled_reqs=op["has_scheduled_reqs"],
        )
        if blocks is None:
            facts.append([None, free_queue_crc(manager.block_pool)])
            continue
        request.num_computed_tokens += num_hits + wanted
        request.status = RequestStatus.RUNNING
        table = list(manager.get_block_ids(request.request_id)[0])
        facts.append([[num_hits, table], free_queue_crc(manager.block_pool)])
    return facts


def record_sizing(w: dict[str, Any]) -> list[int]:
    """Number of blocks for each case."""
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    dtypes = {"float16": torch.float16, "float32": torch.float32}
    facts = []
    for case in w["cases"]:
        config = vllm_config({
            "block_size": case["block_size"], "num_gpu_blocks": 1, "max_model_len": case["max_model_len"],
            "enable_prefix_caching": True, "scheduler_config": {},
        })  # fmt: skip
        config.model_config.original_max_model_len = case["max_model_len"]
        config.cache_config.num_gpu_blocks_override = case["num_gpu_blocks_override"]
        layers = {
            f"layer {i}": FullAttentionSpec(
                block_size=case["block_size"], num_kv_heads=case["num_kv_heads"], head_size=case["head_dim"],
                dtype=dtypes[case["dtype"]],
            )
            for i in range(case["num_layers"])
        }  # fmt: skip
        facts.append(get_kv_cache_configs(config, [layers], [case["budget"]])[0].num_blocks)
    return facts


def defaults_of(config_class: type[Any]) -> dict[str, Any]:
    from pydantic.fields import FieldInfo

    found: dict[str, Any] = {}
    for f in dataclasses.fields(config_class):
        value = f.default.default if isinstance(f.default, FieldInfo) else f.default
        if value is None or isinstance(value, (bool, int, float, str)):
            found[f.name] = value
    return found


def record_defaults() -> dict[str, Any]:
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
    from vllm.engine import arg_utils
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.cpu import CpuPlatform

    arg_utils.current_platform = CpuPlatform()  # a wheel for CUDA does not detect it by itself
    tokens, seqs = EngineArgs.get_batch_defaults(world_size=1)
    return {
        "classes": {c.__name__: defaults_of(c) for c in (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig)},
        "engine_args": sorted(f.name for f in dataclasses.fields(EngineArgs)),
        "cpu_batch_defaults": {
            context.value: [tokens[context], seqs[context]] for context in tokens if context is not None
        },
        "block_size": CacheConfig.DEFAULT_BLOCK_SIZE,
    }


def write(path: Path, workload: dict[str, Any], facts: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"vllm": importlib.metadata.version("vllm"), "workload": workload, "facts": facts}
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    print(f"{path.name}: {path.stat().st_size} bytes, {len(facts)} facts")


def main() -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)  # once: it draws the root of all hashes
    for kind, workloads, record in (
        ("scheduler", scheduler_workloads, record_scheduler),
        ("pool", pool_workloads, record_pool),
        ("manager", manager_workloads, record_manager),
        ("sizing", sizing_workloads, record_sizing),
    ):
        for name, workload in workloads().items():
            write(DATA / "vllm_traces" / f"{kind}_{name}.json", workload, record(workload))
    defaults = {"vllm": importlib.metadata.version("vllm"), **record_defaults()}
    (DATA / "vllm_defaults.json").write_text(json.dumps(defaults, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
