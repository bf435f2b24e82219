from __future__ import annotations

import pytest
from trivet.runtime.kv_cache.block_pool import BlockPool


def ids(pool: BlockPool) -> list[int]:
    return [*pool.free_block_queue.ids()]


def test_the_null_block_is_never_given_out_or_freed() -> None:
    pool = BlockPool(4, enable_caching=True)
    assert [b.block_id for b in pool.get_new_blocks(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="cannot get 1 blocks: 0 are free"):
        pool.get_new_blocks(1)
    pool.free_blocks([pool.null_block])
    pool.check_integrity()
    assert ids(pool) == []


def test_blocks_without_a_hash_are_reused_before_cached_ones() -> None:
    pool = BlockPool(6, enable_caching=True)
    blocks = pool.get_new_blocks(5)
    pool.cache_full_blocks(blocks[:3], [b"x", b"y", b"z"])
    pool.free_blocks(reversed(blocks))
    assert ids(pool) == [5, 4, 3, 2, 1]
    pool.touch([blocks[0]])
    pool.free_blocks([blocks[0]])
    assert ids(pool) == [5, 4, 3, 2, 1]
    pool.touch([blocks[2]])
    pool.free_blocks([blocks[2]])
    assert ids(pool) == [5, 4, 2, 1, 3]  # the last one used is the last one reused


def test_equal_content_stays_in_two_blocks_and_the_first_serves_hits() -> None:
    pool = BlockPool(4, enable_caching=True)
    a, b = pool.get_new_blocks(2)
    pool.cache_full_blocks([a, b], [b"same", b"same"])
    assert pool.get_cached_block(b"same") is a
    pool.free_blocks([a, b])
    pool.get_new_blocks(2)  # block 3 (never cached), then a
    assert pool.get_cached_block(b"same") is b
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"same") is None
    pool.check_integrity()


def test_misuse_is_an_error() -> None:
    pool = BlockPool(4, enable_caching=True)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [b"x"])
    with pytest.raises(ValueError, match="already has a hash"):
        pool.cache_full_blocks([block], [b"y"])
    pool.free_blocks([block])
    with pytest.raises(ValueError, match="freed more often"):
        pool.free_blocks([block])
    with pytest.raises(ValueError, match="num_gpu_blocks is 1"):
        BlockPool(1, enable_caching=True)


def test_blocks_that_were_never_used_come_after_freed_ones_without_a_hash_and_before_cached_ones() -> None:
    pool = BlockPool(6, enable_caching=True)
    a, b = pool.get_new_blocks(2)
    pool.cache_full_blocks([a], [b"x"])
    pool.free_blocks([a, b])
    assert [block.block_id for block in pool.get_new_blocks(5)] == [2, 3, 4, 5, 1]
    assert pool.get_num_free_blocks() == 0
    pool.check_integrity()


def test_a_block_is_made_when_it_is_first_needed() -> None:
    pool = BlockPool(1 << 40, enable_caching=True)
    pool.free_blocks(pool.get_new_blocks(2))
    assert [block.block_id for block in pool.blocks] == [0, 1, 2]
    assert pool.get_num_free_blocks() == (1 << 40) - 1


def test_check_integrity_notices_a_leak() -> None:
    pool = BlockPool(4, enable_caching=True)
    pool.free_blocks(pool.get_new_blocks(3))
    pool.blocks[2].ref_cnt = 1
    with pytest.raises(AssertionError, match="disagree"):
        pool.check_integrity()
