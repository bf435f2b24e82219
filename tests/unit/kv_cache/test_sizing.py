from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trivet.backends.contract.manifest import KVCacheSpec
from trivet.runtime.errors import KVCacheError
from trivet.runtime.kv_cache.sizing import (
    KVCachePlan,
    KVSizingRequest,
    available_memory_bytes,
    page_size_bytes,
    plan_kv_cache,
)

GIB = 1 << 30
SPECS = [
    KVCacheSpec(layer=0, num_kv_heads=2, head_dim=64, kv_offset=0),
    KVCacheSpec(layer=1, num_kv_heads=1, head_dim=256, kv_offset=256, sliding_window=512),
]  # 768 elements per token
PAGE = 768 * 16 * 2
REQUEST = KVSizingRequest(
    kv_cache_specs=SPECS, block_size=16, cache_dtype="float16", model_max_len=2048, max_model_len=None,
    num_gpu_blocks_override=None, kv_cache_memory_bytes=None, gpu_memory_utilization=None, weight_bytes=GIB,
)  # fmt: skip


def plan(free_bytes: int = 64 * GIB, environ: dict[str, str] | None = None, **changes: Any) -> KVCachePlan:
    return plan_kv_cache(msgspec.structs.replace(REQUEST, **changes), free_bytes=free_bytes, environ=environ or {})


def test_arithmetic() -> None:
    assert page_size_bytes(SPECS, 16, "float16") == PAGE
    given = plan(kv_cache_memory_bytes=200 * PAGE + PAGE - 1)
    assert given.num_gpu_blocks == 200
    assert given.total_bytes == 200 * PAGE
    assert given.kv_cache_size_tokens == 199 * 16
    assert given.max_concurrency == pytest.approx(199 / 128)


def test_precedence() -> None:
    env = {"TRIVET_CPU_KVCACHE_SPACE": "0.5"}
    everything: dict[str, Any] = {"gpu_memory_utilization": 0.25, "environ": env, "free_bytes": 9 * GIB}
    override = plan(kv_cache_memory_bytes=GIB, num_gpu_blocks_override=150, **everything)
    assert override.num_gpu_blocks == 150
    assert plan(kv_cache_memory_bytes=GIB, **everything).num_gpu_blocks == GIB // PAGE
    assert plan(**everything).num_gpu_blocks == GIB // 2 // PAGE
    everything["environ"] = None
    assert plan(**everything).num_gpu_blocks == 2 * GIB // PAGE  # a quarter of what the weights leave
    assert plan(free_bytes=9 * GIB).num_gpu_blocks == 1 << 16  # a small model: the count of blocks is the limit
    assert plan(free_bytes=9 * GIB, block_size=64).num_gpu_blocks == 4 * GIB // (4 * PAGE)
    assert plan(free_bytes=3 * GIB).num_gpu_blocks == GIB // PAGE


def test_the_default_grows_to_hold_one_sequence() -> None:
    needed = PAGE * 129
    tight = plan(free_bytes=GIB + int(needed / 0.9))  # half of it would not do
    assert tight.num_gpu_blocks == 129
    with pytest.raises(KVCacheError, match="max_model_len 2048"):
        plan(free_bytes=GIB + needed)  # more than 92 % of the free memory


def test_too_small_says_what_is_needed_and_what_would_fit() -> None:
    with pytest.raises(KVCacheError) as error:
        plan(kv_cache_memory_bytes=101 * PAGE)
    message = str(error.value)
    assert f"{129 * PAGE / GIB:.3f} GiB" in message and f"{101 * PAGE / GIB:.3f} GiB are available" in message
    assert "lower max_model_len to 1600 (the estimated maximum)" in message
    assert plan(kv_cache_memory_bytes=101 * PAGE, max_model_len=1600).num_gpu_blocks == 101
    with pytest.raises(KVCacheError, match="not even one block fits"):
        plan(kv_cache_memory_bytes=PAGE)
    with pytest.raises(KVCacheError, match="num_gpu_blocks_override"):
        plan(num_gpu_blocks_override=20)
    with pytest.raises(KVCacheError, match="lower max_model_len to 2032"):
        plan(num_gpu_blocks_override=128)  # 128 blocks of 16 tokens, but one is the null block
    assert plan(num_gpu_blocks_override=129).max_model_len == 2048
    assert plan(num_gpu_blocks_override=20, max_model_len=304).max_model_len == 304


def test_auto_fits_the_memory() -> None:
    assert plan(max_model_len=-1).max_model_len == 2048
    assert plan(max_model_len=-1, kv_cache_memory_bytes=11 * PAGE).max_model_len == 160
    with pytest.raises(KVCacheError):
        plan(max_model_len=-1, kv_cache_memory_bytes=PAGE)


@pytest.mark.parametrize("text", ["x", "-1", "0", "nan", "inf"])
def test_wrong_environment(text: str) -> None:
    with pytest.raises(KVCacheError, match="TRIVET_CPU_KVCACHE_SPACE"):
        plan(environ={"TRIVET_CPU_KVCACHE_SPACE": text})


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_available_memory_respects_cgroups(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16 kB\nMemAvailable:    1000 kB\n")
    assert available_memory_bytes(proc, root) == 1000 * 1024
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    folder = root / "a"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "memory.max").write_text("max\n")
    (folder / "b" / "memory.current").write_text("5\n")
    (folder / "memory.max").write_text("600000\n")
    (folder / "memory.current").write_text("200000\n")
    (folder / "memory.stat").write_text("anon 100000\ninactive_file 50000\n")
    assert available_memory_bytes(proc, root) == 450_000
    (proc / "self" / "cgroup").write_text("3:cpu,memory:/v1\n")
    v1 = root / "memory" / "v1"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("300000")
    (v1 / "memory.usage_in_bytes").write_text("100000")
    assert available_memory_bytes(proc, root) == 200_000
    (proc / "meminfo").unlink()
    with pytest.raises(KVCacheError, match="kv_cache_memory_bytes"):
        available_memory_bytes(proc, root)


def test_available_memory_of_this_machine() -> None:
    assert available_memory_bytes() > 0
