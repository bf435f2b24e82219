"""KVCacheManager: block tables of requests. The scheduler asks it, it asks the block pool.

All layers share one block table (one KV cache group). Layers with a sliding window therefore keep the blocks that
have left the window, as full attention does: correct, but not yet sparing memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ..request import RequestStatus
from .block_hash import prefix_of_block
from .block_heads import NO_MATCH, HeadMatch
from .block_pool import BlockPool, KVCacheBlock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..request import Request
    from ..scheduler.output import ScheduledRequest

_ADMISSION_STATUSES: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class PrefixCacheStats(msgspec.Struct):
    """Tokens since the manager was made, over the admissions of requests that had not been preempted.

    vLLM records a query at every attempt to admit a request; here only the attempt that succeeds counts, so that a
    request that waits for free blocks does not look like many.
    """

    queries: int = 0  # tokens looked up
    hits: int = 0  # of which found


class _Table:
    """Blocks of one request, in order; `block_ids` mirrors `blocks` and only ever grows."""

    __slots__ = ("block_ids", "blocks", "num_cached_blocks")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.block_ids: list[int] = []
        self.num_cached_blocks = 0  # leading blocks that are in the prefix cache

    def extend(self, blocks: list[KVCacheBlock]) -> None:
        self.blocks.extend(blocks)
        self.block_ids.extend(block.block_id for block in blocks)


class KVCacheManager:
    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_caching: bool = True,
        copy_block_heads: bool = False,
        watermark: float = 0.0,
    ) -> None:
        """`num_gpu_blocks` counts the null block. `copy_block_heads`: the prefix cache also serves a part of a block,
        and what take_block_copies() returns is copied. `watermark` in [0, 1): share of the blocks that admission of a
        waiting request leaves free while others run."""
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.copy_block_heads = enable_caching and copy_block_heads
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.block_pool = BlockPool(num_gpu_blocks, enable_caching)
        self.prefix_cache_stats = PrefixCacheStats()
        self._tables: dict[str, _Table] = {}
        self._block_copies: list[tuple[int, int]] = []

    # --- queries --------------------------------------------------------------------------------------------------
    @property
    def usage(self) -> float:
        return self.block_pool.get_usage()

    def get_block_ids(self, request_id: str) -> list[int]:
        """The live block table: do not change it. It grows when slots are allocated. KeyError without a table."""
        return self._tables[request_id].block_ids

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one request of this many tokens fits when it has the whole pool."""
        return self._num_blocks_for(num_tokens) <= self.block_pool.num_usable_blocks

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Longest cached prefix: its blocks and its number of tokens, a multiple of the block size.

        At most num_tokens - 1 tokens: the last one is always computed, for its logits. Changes nothing.
        """
        hits = self._cached_blocks(request, 0)
        return hits, len(hits) * self.block_size

    def _cached_blocks(self, request: Request, start: int) -> list[KVCacheBlock]:
        """Cached blocks of the request's tokens from its block `start` on, up to the first that is missing."""
        hits: list[KVCacheBlock] = []
        if self.enable_caching and not request.skip_reading_prefix_cache:
            for block_hash in request.block_hashes[start : (request.num_tokens - 1) // self.block_size]:
                block = self.block_pool.get_cached_block(block_hash)
                if block is None:
                    break
                hits.append(block)
        return hits

    def get_block_head(self, request: Request, hits: list[KVCacheBlock]) -> HeadMatch:
        """What the request's first block after the hits can begin with; not its last token either. Changes nothing."""
        start = len(hits) * self.block_size
        end = min(start + self.block_size, request.num_tokens - 1)
        if not self.copy_block_heads or request.skip_reading_prefix_cache or start >= end:
            return NO_MATCH
        return self.block_pool.heads.match(prefix_of_block(request, len(hits)), request.token_bytes(start, end))

    # --- changes --------------------------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """The step before is over: what it computed is in the cache."""
        self.block_pool.heads.settle()

    def take_block_copies(self) -> list[tuple[int, int]]:
        """(from, to): blocks to be copied before the step computes anything, in this order."""
        copies, self._block_copies = self._block_copies, []
        return copies

    def extend_prefix_hit(self, request: Request) -> int:
        """Append blocks that others have computed since the request was admitted to its table; their tokens.

        Only while the tokens computed so far fill the table. The request still computes its last token.
        """
        table = self._tables[request.request_id]
        if len(table.blocks) * self.block_size != request.num_computed_tokens:
            return 0
        hits = self._cached_blocks(request, len(table.blocks))
        self._take_hits(table, hits)
        return len(hits) * self.block_size

    def _take_hits(self, table: _Table, hits: list[KVCacheBlock]) -> None:
        """Append cached blocks to a table whose blocks are all cached."""
        self.block_pool.touch(hits)
        table.extend(hits)
        table.num_cached_blocks += len(hits)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        new_computed_blocks: list[KVCacheBlock] | None = None,
        head: HeadMatch = NO_MATCH,
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> list[KVCacheBlock] | None:
        """Make room for `num_new_tokens` more tokens; the new blocks, or None (nothing changed) when too few are free.

        new_computed_blocks: prefix hit of a request that has no table yet, which begins with these blocks; head: what
        get_block_head() found behind them, to be copied to the first new block. num_lookahead_tokens: slots beyond the
        new tokens (speculation). full_sequence_must_fit: also require room for all tokens known so far, not only for
        this step's. reserved_blocks: blocks that must stay free for others. has_scheduled_reqs: whether others run; the
        watermark then applies to requests that are being admitted.
        Blocks that become full, of tokens that are final, enter the prefix cache at once: requests of the same step may
        hit them. Raises ValueError when num_new_tokens < 1.
        """
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens is {num_new_tokens}; at least 1 is needed")
        table = self._tables.get(request.request_id)
        hits = new_computed_blocks or []
        if table is not None and hits:
            raise ValueError(f"request {request.request_id!r} has a block table; it cannot have a new prefix hit")
        num_held = len(hits) if table is None else len(table.blocks)
        num_free = self.block_pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in hits)
        watermark = self.watermark_blocks if has_scheduled_reqs and request.status in _ADMISSION_STATUSES else 0
        if full_sequence_must_fit:
            num_full = self._num_blocks_for(min(request.num_tokens, self.max_model_len))
            if num_full - num_held + watermark > num_free:
                return None
        num_computed = request.num_computed_tokens + len(hits) * self.block_size + head.num_tokens
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        num_new_blocks = max(0, self._num_blocks_for(num_slots) - num_held)
        if num_new_blocks + watermark > num_free - reserved_blocks:
            return None
        if table is None:
            table = self._tables[request.request_id] = _Table()
            self._take_hits(table, hits)
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks) if num_new_blocks else []
        table.extend(new_blocks)
        if head.block is not None and head.block is not new_blocks[0]:
            self._block_copies.append((head.block.block_id, new_blocks[0].block_id))
        if self.enable_caching:
            self._cache_blocks(request, table, num_computed, min(num_computed + num_new_tokens, request.num_tokens))
        return new_blocks

    def _cache_blocks(self, request: Request, table: _Table, num_computed: int, num_final: int) -> None:
        start, end = table.num_cached_blocks, num_final // self.block_size
        if end > start:
            self.block_pool.cache_full_blocks(table.blocks[start:end], request.block_hashes[start:end])
            table.num_cached_blocks = end
        decodes = num_final - num_computed <= 1
        if not decodes or num_final % self.block_size == 0:  # while it decodes, whole blocks are enough
            self._record_heads(request, table, num_computed, num_final)

    def _record_heads(self, request: Request, table: _Table, start: int, end: int) -> None:
        """Blocks that hold the tokens [start, end) can be copied from after this step, up to `end`."""
        if not self.copy_block_heads:
            return
        for index in range(start // self.block_size, self._num_blocks_for(end)):
            first = index * self.block_size
            token_bytes = request.token_bytes(first, min(first + self.block_size, end))
            self.block_pool.heads.record(prefix_of_block(request, index), table.blocks[index], token_bytes)

    def free(self, request: Request) -> None:
        """Give up the table, last block first, so that of a cached prefix the end is reused before the start."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            num_whole = request.num_computed_tokens // self.block_size * self.block_size
            self._record_heads(request, table, num_whole, request.num_computed_tokens)
            self.block_pool.free_blocks(reversed(table.blocks))

    def forget_step(self, scheduled: Iterable[ScheduledRequest]) -> None:
        """The step did not write what it should have: take the blocks that it filled out of the prefix cache.

        The requests have to be freed next: their tables still count these blocks as cached.
        """
        for item in scheduled:
            item.request.num_computed_tokens = item.num_computed_tokens
            self.block_pool.evict_blocks(item.block_ids[item.num_computed_tokens // self.block_size :])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while any request holds blocks."""
        return self.block_pool.reset_prefix_cache()

    def record_prefix_query(self, request: Request, num_hits: int) -> None:
        """Count one admission in the statistics (not a return from preemption, nor when the cache was not read)."""
        if self.enable_caching and not request.skip_reading_prefix_cache and request.num_preemptions == 0:
            self.prefix_cache_stats.queries += request.num_tokens
            self.prefix_cache_stats.hits += num_hits

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- check ----------------------------------------------------------------------------------------------------
    def check_integrity(self) -> None:
        """Raises AssertionError when tables and pool disagree. For tests and idle time."""
        self.block_pool.check_integrity()
        held: dict[int, int] = {}
        for request_id, table in self._tables.items():
            assert [b.block_id for b in table.blocks] == table.block_ids, f"{request_id}: block_ids is stale"
            assert len(set(table.block_ids)) == len(table.block_ids), f"{request_id}: a block is in the table twice"
            assert all(b.block_hash is not None for b in table.blocks[: table.num_cached_blocks]), request_id
            for block_id in table.block_ids:
                held[block_id] = held.get(block_id, 0) + 1
        for block in self.block_pool.blocks[1:]:
            holders = held.get(block.block_id, 0)
            assert block.ref_cnt == holders, f"{block}: {holders} tables hold it"
