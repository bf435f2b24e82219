"""BlockPool: the KV blocks of the cache, who holds them, and which of the free ones may still serve a prefix hit.

Block 0 is the null block: never given out, never freed. A free block keeps its hash until it is given out again, so
the free queue, first in first out, is the LRU order of the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .block_heads import BlockHeads


class KVCacheBlock:
    """One block. `block_hash` is set while its content can serve a hit; the links are the free queue's."""

    __slots__ = ("block_hash", "block_id", "is_null", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.is_null = False
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        cached = "cached" if self.block_hash is not None else "not cached"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, {cached})"


class FreeBlockQueue:
    """Doubly linked list of free blocks, linked through the blocks: O(1) pop, append, prepend and removal anywhere.

    A block is made when it is first given out: there are tens of thousands, and a start needs a few. Those that are yet
    to be made come after all that was prepended and before all that was appended.
    """

    def __init__(self, blocks: list[KVCacheBlock], num_blocks: int) -> None:
        """`blocks`: all that exist, by id, none of them free. Up to `num_blocks` are made, and added to it."""
        self._head = KVCacheBlock(-1)  # sentinels: every real block has two neighbours
        self._unmade = KVCacheBlock(-1)  # in the place of blocks that are yet to be made
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail.prev_free = self._unmade
        self._unmade.prev_free, self._unmade.next_free = self._head, self._tail
        self._blocks, self._num_blocks = blocks, num_blocks
        self.num_free_blocks = num_blocks - len(blocks)

    def ids(self) -> Iterator[int]:
        """Of the free blocks, from the next one to be given out to the last."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            if block is self._unmade:
                yield from range(len(self._blocks), self._num_blocks)
            else:
                yield block.block_id
            block = block.next_free

    def popleft(self) -> KVCacheBlock:
        """Raises IndexError when empty."""
        block = self._head.next_free
        if block is self._unmade:
            if len(self._blocks) < self._num_blocks:
                self._blocks.append(KVCacheBlock(len(self._blocks)))
                self.num_free_blocks -= 1
                return self._blocks[-1]
            block = block.next_free
        if block is None or block is self._tail:
            raise IndexError("the free queue is empty")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Raises ValueError when the block is not in the queue."""
        prev_free, next_free = block.prev_free, block.next_free
        if prev_free is None or next_free is None:
            raise ValueError(f"{block} is not in the free queue")
        prev_free.next_free = next_free
        next_free.prev_free = prev_free
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """At the back, in the given order."""
        last = self._tail.prev_free
        assert last is not None
        self._link(last, blocks, self._tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """At the front, blocks[0] first of all."""
        first = self._head.next_free
        assert first is not None
        self._link(self._head, blocks, first)

    def _link(self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock) -> None:
        for block in blocks:
            if block.prev_free is not None:
                raise ValueError(f"{block} is in the free queue already")
            block.prev_free = before
            before.next_free = block
            before = block
        before.next_free = after
        after.prev_free = before
        self.num_free_blocks += len(blocks)


class BlockPool:
    """`num_gpu_blocks` (vLLM's name; here they lie in host memory) blocks, the null block included."""

    def __init__(self, num_gpu_blocks: int, enable_caching: bool) -> None:
        """Raises ValueError for less than two blocks: the null block and one to use."""
        if num_gpu_blocks < 2:
            raise ValueError(f"num_gpu_blocks is {num_gpu_blocks}; at least 2 are needed (one is the null block)")
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.null_block = KVCacheBlock(0)
        self.null_block.is_null = True
        self.blocks = [self.null_block]  # by id, those that have been needed
        self.free_block_queue = FreeBlockQueue(self.blocks, num_gpu_blocks)
        # hash -> {block id: block}. Blocks of equal content are kept side by side, never merged: a request's table
        # must not change under it. The first one inserted serves the hits.
        self.cached_block_hash_to_block: dict[bytes, dict[int, KVCacheBlock]] = {}
        self.heads = BlockHeads()

    # --- queries --------------------------------------------------------------------------------------------------
    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can ever hold: all but the null block."""
        return self.num_gpu_blocks - 1

    def get_usage(self) -> float:
        """Share of the usable blocks that requests hold now, 0 to 1."""
        return 1.0 - self.get_num_free_blocks() / self.num_usable_blocks

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """A block with this content (in use or free), None = miss."""
        candidates = self.cached_block_hash_to_block.get(block_hash)
        return next(iter(candidates.values())) if candidates else None

    # --- changes --------------------------------------------------------------------------------------------------
    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the front of the free queue; what they had cached is forgotten.

        Raises ValueError when fewer are free: callers check first, so nothing is taken then.
        """
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(f"cannot get {num_blocks} blocks: {self.get_num_free_blocks()} are free")
        new_blocks = []
        for _ in range(num_blocks):
            block = self.free_block_queue.popleft()
            self._evict(block)
            block.ref_cnt = 1
            new_blocks.append(block)
        return new_blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more holder for each block (a prefix hit); a free one leaves the free queue."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One holder less for each; blocks without holders become free, the first given the first to be reused.

        Blocks without a hash or a head can never serve a hit, so they go to the front of the queue, before all cached
        ones. Raises ValueError for a block that nobody holds.
        """
        cached: list[KVCacheBlock] = []
        uncached: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.ref_cnt <= 0:
                raise ValueError(f"{block} is freed more often than it was taken")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (cached if block.block_hash is not None or block in self.heads else uncached).append(block)
        self.free_block_queue.prepend_n(uncached)
        self.free_block_queue.append_n(cached)

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[bytes]) -> None:
        """Make full blocks available to hits. `blocks` and `block_hashes` are aligned; the blocks have no hash yet."""
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block.is_null:
                continue
            if block.block_hash is not None:
                raise ValueError(f"{block} already has a hash")
            block.block_hash = block_hash
            self.cached_block_hash_to_block.setdefault(block_hash, {})[block.block_id] = block

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Blocks that can serve no hit any more, whoever holds them."""
        for block_id in block_ids:
            self._evict(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False, and nothing happens, while a request holds a block."""
        if self.get_num_free_blocks() != self.num_usable_blocks:
            return False
        self.cached_block_hash_to_block.clear()
        self.heads.clear()
        for block in self.blocks:
            block.block_hash = None
        return True

    def _evict(self, block: KVCacheBlock) -> None:
        self.heads.forget(block)
        if block.block_hash is None:
            return
        same_content = self.cached_block_hash_to_block[block.block_hash]
        del same_content[block.block_id]
        if not same_content:
            del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None

    # --- check ----------------------------------------------------------------------------------------------------
    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself. O(num_gpu_blocks): for tests and idle time."""
        free = list(self.free_block_queue.ids())
        free_ids = set(free)
        assert len(free_ids) == len(free) == self.free_block_queue.num_free_blocks, "a block is free twice"
        assert self.null_block.block_id not in free_ids, "the null block is free"
        assert self.null_block.block_hash is None, "the null block is cached"
        for block in self.blocks[1:]:
            assert block.ref_cnt >= 0, f"{block} has a negative ref_cnt"
            assert (block.ref_cnt == 0) == (block.block_id in free_ids), f"{block}: ref_cnt and free queue disagree"
        used = sum(block.ref_cnt > 0 for block in self.blocks[1:])
        assert len(free) + used == self.num_usable_blocks, "free + used != total"
        mapped = {
            block_id: block_hash
            for block_hash, same_content in self.cached_block_hash_to_block.items()
            for block_id in same_content
        }
        hashed = {b.block_id: b.block_hash for b in self.blocks if b.block_hash is not None}
        assert mapped == hashed, "hashes of the blocks and the cached map disagree"
        assert all(self.cached_block_hash_to_block.values()), "an empty entry in the cached map"
        assert self.enable_caching or not hashed, "blocks are cached with caching off"
        self.heads.check_integrity()
