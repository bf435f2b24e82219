from __future__ import annotations

from typing import Any

from trivet.runtime.kv_cache.block_hash import hash_block_tokens, make_block_hasher
from trivet.runtime.request import Request
from trivet.runtime.sampling_params import SamplingParams


def hashes(prompt: list[int], block_size: int = 4, **kwargs: Any) -> list[bytes]:
    request = Request("r", prompt, SamplingParams(), **kwargs)
    request.set_block_hasher(make_block_hasher(block_size))
    return request.block_hashes


def test_only_full_blocks_are_hashed_and_the_chain_carries_the_prefix() -> None:
    first = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(first) == 2 and all(len(h) == 32 for h in first)
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8]) == first
    other = hashes([0, 2, 3, 4, 5, 6, 7, 8])
    assert other[0] != first[0] and other[1] != first[1]  # same tokens in block 1, another prefix


def test_salt_and_lora_separate_tenants() -> None:
    prompt = [*range(8)]
    plain, a, b = hashes(prompt), hashes(prompt, cache_salt="a"), hashes(prompt, cache_salt="b")
    lora = hashes(prompt, lora_name="a")
    assert len({plain[0], a[0], b[0], lora[0]}) == len({plain[1], a[1], b[1], lora[1]}) == 4
    assert hashes(prompt, cache_salt="a") == a
    assert hashes(prompt, lora_name="x", cache_salt="y") != hashes(prompt, lora_name="xy")


def test_the_salt_itself_enters_the_first_block_only() -> None:
    salted = hashes([*range(8)], cache_salt="a")
    tokens = Request("r", [4, 5, 6, 7], SamplingParams()).token_bytes(0, 4)
    assert salted[1] == hash_block_tokens(salted[0], tokens, ())


def test_appended_tokens_are_hashed_as_blocks_fill_up() -> None:
    request = Request("r", [1, 2, 3], SamplingParams())
    request.set_block_hasher(make_block_hasher(4))
    assert request.block_hashes == []
    request.append_output_token_ids(4)
    request.append_output_token_ids([5, 6, 7, 8, 9])
    assert request.block_hashes == hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])
