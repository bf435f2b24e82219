"""Block heads: where a known prefix ends within a block, a request begins its own block with a copy of those tokens.

Block hashes find whole blocks. Here is, for every prefix of whole blocks, the block that was last written behind it,
and the tokens that it begins with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from .block_pool import KVCacheBlock

_BYTES_PER_TOKEN = 4  # token ids are int32


class _Head(msgspec.Struct, frozen=True):
    block: KVCacheBlock
    token_bytes: bytes  # ids of the block's first tokens; it may hold more by now


class HeadMatch(msgspec.Struct, frozen=True):
    """How many of a request's next tokens are at the beginning of a block."""

    block: KVCacheBlock | None  # to be copied; None = none of them
    num_tokens: int  # in `block`
    num_tokens_soon: int  # in the block that will be the one to copy in the next step


NO_MATCH = HeadMatch(None, 0, 0)


class BlockHeads:
    """The latest head behind each prefix. What is recorded can be copied from the next settle() on."""

    def __init__(self) -> None:
        self._written: dict[bytes, _Head] = {}
        self._recorded: dict[bytes, _Head] = {}  # since settle(): the step that writes them has yet to run
        self._prefixes: dict[int, bytes] = {}  # block id -> the prefix that it was recorded behind

    def __contains__(self, block: KVCacheBlock) -> bool:
        prefix = self._prefixes.get(block.block_id)
        if prefix is None:
            return False
        return any(prefix in heads and heads[prefix].block is block for heads in (self._written, self._recorded))

    def record(self, prefix: bytes, block: KVCacheBlock, token_bytes: bytes) -> None:
        """`prefix` identifies all that comes before the block (block_hash.py)."""
        self._prefixes[block.block_id] = prefix
        self._recorded[prefix] = _Head(block, token_bytes)

    def settle(self) -> None:
        """The step is over: all that was recorded has been written."""
        self._written.update(self._recorded)
        self._recorded.clear()

    def match(self, prefix: bytes, token_bytes: bytes) -> HeadMatch:
        """The longest common beginning of `token_bytes` and the head behind `prefix`."""
        written, recorded = self._written.get(prefix), self._recorded.get(prefix)
        num_tokens = 0 if written is None else _common_tokens(written.token_bytes, token_bytes)
        num_soon = num_tokens if recorded is None else _common_tokens(recorded.token_bytes, token_bytes)
        block = written.block if written is not None and num_tokens > 0 else None
        return HeadMatch(block, num_tokens, num_soon)

    def forget(self, block: KVCacheBlock) -> None:
        """The block gets other content, or none that can be relied upon."""
        prefix = self._prefixes.pop(block.block_id, None)
        if prefix is not None:
            for heads in (self._written, self._recorded):
                if prefix in heads and heads[prefix].block is block:
                    del heads[prefix]

    def check_integrity(self) -> None:
        """Raises AssertionError when the maps contradict each other."""
        for heads in (self._written, self._recorded):
            for prefix, head in heads.items():
                assert self._prefixes.get(head.block.block_id) == prefix, f"{head.block} is not where its head is"
                assert head.token_bytes and len(head.token_bytes) % _BYTES_PER_TOKEN == 0, head.block

    def clear(self) -> None:
        self._written.clear()
        self._recorded.clear()
        self._prefixes.clear()


def _common_tokens(a: bytes, b: bytes) -> int:
    end = min(len(a), len(b))
    while a[:end] != b[:end]:
        end -= _BYTES_PER_TOKEN
    return end // _BYTES_PER_TOKEN
