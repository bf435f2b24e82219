"""How many KV blocks a model gets: from an explicit size, or from the memory that is free now."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ..._log import get_logger
from ...backends.contract.opset import KV_DTYPES
from ..errors import KVCacheError

if TYPE_CHECKING:
    from ...backends.contract.manifest import KVCacheSpec

logger = get_logger(__name__)

GIB: Final = 1 << 30
KV_SPACE_ENV: Final = "TRIVET_CPU_KVCACHE_SPACE"  # GiB
DEFAULT_MAX_BYTES: Final = 4 * GIB  # of a default-sized cache, unless one sequence needs more
DEFAULT_MAX_BLOCKS: Final = 1 << 16  # of a default-sized cache: each block that was ever used is a Python object
DEFAULT_FRACTION: Final = 0.5  # of the free memory, for a default-sized cache
LIMIT_FRACTION: Final = 0.92  # of the free memory, up to which a default-sized cache grows to hold one sequence


class KVCachePlan(msgspec.Struct, frozen=True):
    """The KV cache as it will be allocated."""

    num_gpu_blocks: int  # the null block included
    block_size: int  # tokens
    cache_dtype: str  # a name of KV_DTYPES (backends/contract/opset.py)
    page_size_bytes: int  # one block, all layers
    max_model_len: int  # tokens

    @property
    def total_bytes(self) -> int:
        return self.num_gpu_blocks * self.page_size_bytes

    @property
    def kv_cache_size_tokens(self) -> int:
        """What requests can hold together."""
        return (self.num_gpu_blocks - 1) * self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many sequences of max_model_len tokens fit at once."""
        return (self.num_gpu_blocks - 1) / math.ceil(self.max_model_len / self.block_size)


class KVSizingRequest(msgspec.Struct, frozen=True):
    """What the user and the model say. Of the three sizes the first that is set wins."""

    kv_cache_specs: Sequence[KVCacheSpec]
    block_size: int
    cache_dtype: str  # a name of KV_DTYPES
    model_max_len: int  # tokens, the model's own limit
    max_model_len: int | None  # tokens; None = the model's limit, -1 = what fits
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float | None  # of the free memory; None = the default rule
    weight_bytes: int  # the weights' pages are to stay in memory beside the cache

    @property
    def page_size_bytes(self) -> int:
        return page_size_bytes(self.kv_cache_specs, self.block_size, self.cache_dtype)

    def blocks_for(self, num_tokens: int) -> int:
        """To hold one sequence: its blocks and the null block."""
        return -(-num_tokens // self.block_size) + 1


def page_size_bytes(specs: Sequence[KVCacheSpec], block_size: int, cache_dtype: str) -> int:
    """Bytes of one block, K and V of all layers; cache_dtype: a name of KV_DTYPES."""
    return block_size * sum(spec.bytes_per_token(KV_DTYPES[cache_dtype]) for spec in specs)


def plan_kv_cache(
    request: KVSizingRequest,
    *,
    free_bytes: int | None = None,
    device_memory: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> KVCachePlan:
    """Decide on the number of blocks and on max_model_len.

    num_gpu_blocks_override > kv_cache_memory_bytes > $TRIVET_CPU_KVCACHE_SPACE > gpu_memory_utilization of the free
    memory > default: half of the free memory but at most 4 GiB or 65,536 blocks, more (up to 92 % of it) if one
    sequence of max_model_len needs more. Free memory is `free_bytes` (None = asked of the system) less the weights.
    device_memory: `free_bytes` is a device's own; the variable, which is the CPU's, does not count, and the default is
    92 % of it or 65,536 blocks.
    Raises KVCacheError when the cache cannot hold one sequence of max_model_len tokens.
    """
    page = request.page_size_bytes
    wanted_len = request.model_max_len if request.max_model_len in (None, -1) else request.max_model_len
    assert wanted_len is not None
    if request.num_gpu_blocks_override is not None:
        num_blocks, source = request.num_gpu_blocks_override, "num_gpu_blocks_override"
        budget = num_blocks * page
    else:
        one_sequence = page * request.blocks_for(wanted_len)
        budget, source = _budget_bytes(
            request, one_sequence, free_bytes, {} if device_memory else environ, device_memory
        )
        num_blocks = budget // page
    feasible_len = min(max(num_blocks - 1, 0) * request.block_size, request.model_max_len)
    if request.max_model_len == -1:
        wanted_len = min(wanted_len, feasible_len)
    if num_blocks < max(2, request.blocks_for(wanted_len)):
        raise KVCacheError(_too_small_message(request, wanted_len, budget, feasible_len, source))
    plan = KVCachePlan(num_blocks, request.block_size, request.cache_dtype, page, wanted_len)
    logger.info(
        "KV cache size: %d tokens in %s (%.2f GiB, from %s)",
        plan.kv_cache_size_tokens,
        plan.cache_dtype,
        plan.total_bytes / GIB,
        source,
    )
    logger.info("Maximum concurrency for %d tokens per request: %.2fx", plan.max_model_len, plan.max_concurrency)
    return plan


def _budget_bytes(
    request: KVSizingRequest,
    one_sequence: int,
    free_bytes: int | None,
    environ: Mapping[str, str],
    device_memory: bool,
) -> tuple[int, str]:
    """(bytes, where they come from)."""
    if request.kv_cache_memory_bytes is not None:
        return request.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    if space := environ.get(KV_SPACE_ENV):
        return _parse_space(space), f"${KV_SPACE_ENV}"
    free = available_memory_bytes() if free_bytes is None else free_bytes
    free = max(0, free - request.weight_bytes)
    if request.gpu_memory_utilization is not None:
        share = request.gpu_memory_utilization
        return int(share * free), f"gpu_memory_utilization {share:g} of {free / GIB:.2f} GiB free memory"
    if device_memory:
        budget = min(DEFAULT_MAX_BLOCKS * request.page_size_bytes, int(LIMIT_FRACTION * free))
    else:
        budget = min(DEFAULT_MAX_BYTES, DEFAULT_MAX_BLOCKS * request.page_size_bytes, int(DEFAULT_FRACTION * free))
    if request.max_model_len != -1:
        budget = max(budget, min(one_sequence, int(LIMIT_FRACTION * free)))
    return budget, f"the default share of {free / GIB:.2f} GiB free memory"


def _parse_space(text: str) -> int:
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not (math.isfinite(gib) and gib > 0):
        raise KVCacheError(f"${KV_SPACE_ENV} is {text!r}; expected a positive number of GiB, such as 4 or 0.5")
    return int(gib * GIB)


def _too_small_message(request: KVSizingRequest, wanted_len: int, budget: int, feasible_len: int, source: str) -> str:
    needed = request.page_size_bytes * request.blocks_for(max(wanted_len, 1))
    advice = (
        f"lower max_model_len to {feasible_len} (the estimated maximum) or less, or raise kv_cache_memory_bytes"
        if feasible_len > 0
        else "raise kv_cache_memory_bytes: not even one block fits"
    )
    return (
        f"one sequence of max_model_len {wanted_len} tokens needs {needed / GIB:.3f} GiB of KV cache, "
        f"{budget / GIB:.3f} GiB are available ({source}); {advice}"
    )


# --- free memory --------------------------------------------------------------------------------------------------
def available_memory_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory this process may still use, page cache included: the system's, or less under a cgroup limit.

    Raises KVCacheError where the system does not say.
    """
    system = _meminfo_available(proc) if sys.platform == "linux" else _half_of_physical()
    if system is None:
        raise KVCacheError(
            "the system does not say how much memory is free; give the size of the KV cache: kv_cache_memory_bytes"
        )
    limits = _cgroup_headrooms(proc, cgroup_root)
    return max(0, min([system, *limits]))


def _meminfo_available(proc: Path) -> int | None:
    text = _read(proc / "meminfo") or ""
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _half_of_physical() -> int | None:
    """Systems without MemAvailable: half of the memory is a cautious guess."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return None


def _cgroup_headrooms(proc: Path, root: Path) -> list[int]:
    """Limit less use, for the process's cgroup and those above it; v2 and v1."""
    headrooms: list[int] = []
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.lstrip("/")
        for level in (folder, *folder.parents):
            if not level.is_relative_to(base):
                break
            headroom = _cgroup_headroom(level, *names)
            if headroom is not None:
                headrooms.append(headroom)
    return headrooms


def _cgroup_headroom(folder: Path, limit_name: str, usage_name: str, inactive_name: str) -> int | None:
    limit, usage = _read(folder / limit_name), _read(folder / usage_name)
    if limit is None or usage is None or not limit.strip().isdigit():  # "max" = no limit
        return None
    reclaimable = 0
    for line in (_read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == inactive_name:
            reclaimable = int(value)
    return int(limit) - int(usage) + reclaimable


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
