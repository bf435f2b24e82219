"""PagedAttention in every tier against NumPy float64, and against itself bit for bit under every way to batch it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .attention_cache import BASE, EXACT, Cache, check_against_reference, check_batching, make_tokens
from .reference_attention import AttentionShape, from_kv_dtype, paged_attention
from .single_op import available_tiers, run_op
from .sizes import sized

Array = NDArray[Any]
TIERS = available_tiers()
INT16_TIERS = [("int16_per_token_head", tier) for tier in TIERS if tier.startswith("avx512")]
VARIANTS: dict[str, tuple[AttentionShape, dict[str, Any]]] = {
    "smollm2": (BASE, {}),
    "mha": (replace(BASE, num_heads=4, num_kv_heads=4), {}),
    "mqa_7": (replace(BASE, num_heads=7, num_kv_heads=1, head_dim=32), {}),
    "head_8": (replace(BASE, num_heads=2, num_kv_heads=1, head_dim=8), {}),
    "head_24": (replace(BASE, num_heads=3, num_kv_heads=3, head_dim=24), {}),
    "head_80": (replace(BASE, num_heads=2, num_kv_heads=2, head_dim=80), {"rotary_dim": 32}),
    "head_96": (replace(BASE, num_heads=6, num_kv_heads=2, head_dim=96), {}),
    "head_128": (replace(BASE, num_heads=2, num_kv_heads=1, head_dim=128, block_size=1), {"norms": True}),
    "head_256": (replace(BASE, num_heads=4, num_kv_heads=1, head_dim=256, scale=0.0625), {"norms": True}),
    "head_512": (replace(BASE, num_heads=1, num_kv_heads=1, head_dim=512, scale=0.04), {}),
    "interleaved": (replace(BASE, rope_interleaved=1), {"rotary_dim": 20}),
    "no_rope": (BASE, {"rotary_dim": 0}),
    "block_24": (replace(BASE, block_size=24, kv_dtype="float16"), {}),
    "block_64": (replace(BASE, block_size=64, num_heads=14, num_kv_heads=2), {}),
    "window_1": (replace(BASE, sliding_window=1), {}),
    "window_5": (replace(BASE, sliding_window=5, block_size=3), {}),
    "window_300": (replace(BASE, sliding_window=300), {}),
    "soft_cap": (replace(BASE, soft_cap=2.0), {}),
    "sinks": (BASE, {"sinks": True}),
    "all": (replace(BASE, soft_cap=5.0, sliding_window=70, block_size=7), {"sinks": True, "norms": True}),
    "float16": (replace(BASE, kv_dtype="float16"), {}),
    "bfloat16": (replace(BASE, kv_dtype="bfloat16"), {"norms": True}),
    "float16_128": (
        replace(BASE, num_heads=8, num_kv_heads=2, head_dim=128, kv_dtype="float16", soft_cap=20.0),
        {"sinks": True},
    ),
    "bfloat16_window": (replace(BASE, head_dim=128, kv_dtype="bfloat16", sliding_window=70), {}),
    "float16_tail": (replace(BASE, kv_dtype="float16", head_dim=40, block_size=5), {}),
    "second_layer": (replace(BASE, kv_offset=384, elements_per_token=1200, kv_dtype="float16"), {}),
    "float16_80": (replace(BASE, num_heads=2, num_kv_heads=2, head_dim=80, kv_dtype="float16"), {"rotary_dim": 32}),
    "bfloat16_96": (replace(BASE, num_heads=6, num_kv_heads=2, head_dim=96, kv_dtype="bfloat16"), {}),
    "float16_256": (
        replace(BASE, num_heads=4, num_kv_heads=1, head_dim=256, scale=0.0625, kv_dtype="float16"),
        {"norms": True},
    ),
    "bfloat16_256": (
        replace(BASE, num_heads=4, num_kv_heads=2, head_dim=256, scale=0.0625, kv_dtype="bfloat16", sliding_window=100),
        {"norms": True},
    ),
    "float16_mqa_20": (replace(BASE, num_heads=20, num_kv_heads=1, kv_dtype="float16"), {}),
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_reference(name: str, tier: str) -> None:
    shape, options = VARIANTS[name]
    check_against_reference(shape, tier, options)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_do_not_depend_on_batching(name: str, tier: str) -> None:
    shape, options = VARIANTS[name]
    check_batching(shape, tier, options)


@pytest.mark.parametrize("tier", TIERS)
def test_long_context_in_partitions(tier: str) -> None:
    """Decode at many keys splits into partitions over threads; prefill there does not; one KV head has few items."""
    length = sized(1101, 301)
    shape = replace(BASE, num_heads=2, num_kv_heads=1, head_dim=32, kv_dtype="float16")
    tokens = make_tokens(shape, length)
    whole = Cache(shape, tokens, tier, **EXACT).step((0, 0, length))
    for threads in (1, 2, 5):
        cache = Cache(shape, tokens, tier, num_threads=threads, **EXACT)
        cache.step((0, 0, length - 1))
        assert cache.step((0, length - 1, length)).tobytes() == whole[length - 1].tobytes()


def test_a_shared_prefix_gives_the_same_bits() -> None:
    """Two sequences that share their first blocks, the second of which computes only its own part."""
    shape = replace(BASE, block_size=8)
    first, second = make_tokens(shape, 100, 101)
    second = np.concatenate([first[:64], second[64:]])
    alone = Cache(shape, [second], TIERS[-1]).step((0, 0, 101))
    tables = [list(range(1, 14)), [*range(1, 9), *range(20, 25)]]
    shared = Cache(shape, [first, second], TIERS[-1], blocks=tables)
    shared.step((0, 0, 100))
    assert shared.step((1, 64, 101)).tobytes() == alone[64:].tobytes()


@pytest.mark.parametrize(("dtype", "tier"), [*product(("float16", "float32"), TIERS), *INT16_TIERS])
def test_requests_that_decode_behind_a_shared_prefix_give_the_bits_of_each_alone(tier: str, dtype: str) -> None:
    """Some share two partitions of 256 keys, one of them only one, and one shares nothing."""
    shape = replace(BASE, kv_dtype=dtype, head_dim=32)
    lengths = [530, 600, 513, 777, 540, 300, 701, 560]
    prompts = make_tokens(shape, *lengths)
    whole, half = 512 // shape.block_size, 256 // shape.block_size
    tables: list[list[int]] = []
    free = 1
    for r, length in enumerate(lengths):
        shared = {0: 0, 4: half, 5: half, 6: 0}.get(r, whole)
        own = -(-length // shape.block_size) - shared
        tables.append(tables[0][:shared] + list(range(free, free + own)) if r else list(range(1, 1 + own)))
        free += own
        prompts[r][: shared * shape.block_size] = prompts[0][: shared * shape.block_size]
    alone = [Cache(shape, [prompt], tier).step((0, 0, len(prompt)))[-1] for prompt in prompts]
    for threads in (1, 2):
        cache = Cache(shape, prompts, tier, num_threads=threads, blocks=tables)
        for r, length in enumerate(lengths):
            cache.step((r, 0, length - 1))
        got = cache.step(*((r, length - 1, length) for r, length in enumerate(lengths)))
        for r in range(len(lengths)):
            assert got[r].tobytes() == alone[r].tobytes(), r


def test_slot_minus_one_does_not_write() -> None:
    cache = Cache(BASE, make_tokens(BASE, 20), TIERS[-1])
    first = cache.step((0, 0, 20))
    before = cache.memory.copy()
    again = cache.step((0, 10, 20), write=False)
    assert (cache.memory == before).all() and again.tobytes() == first[10:].tobytes()


@pytest.mark.parametrize("tier", TIERS)
def test_a_row_never_reads_a_later_value(tier: str) -> None:
    """An infinite value in a later token must not reach earlier rows through a weight of zero."""
    tokens = make_tokens(BASE, 40)
    clean = Cache(BASE, tokens, tier).step((0, 0, 40))
    tokens[0][21, 12 * 64 :] = np.inf
    out = Cache(BASE, tokens, tier).step((0, 0, 40))
    assert out[:21].tobytes() == clean[:21].tobytes() and not np.isfinite(out[21:]).any()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("window", [5, 64, 300])
def test_a_window_layer_reads_only_its_window(window: int, tier: str) -> None:
    """Everything older than the window may hold anything: the blocks are there, their content is not looked at."""
    shape = replace(BASE, sliding_window=window, kv_dtype="float16")
    first, end = sized((400, 420), (310, 313))
    cache = Cache(shape, make_tokens(shape, end), tier)
    cache.step((0, 0, first))
    before = cache.memory.copy()
    expected = [cache.step((0, t, t + 1)).tobytes() for t in range(first, end)]
    cache.memory = before
    for t in range(first, end):
        for position in range(t + 1 - window):
            block, offset = divmod(position, shape.block_size)
            for view in cache.shape.slot(cache.memory, cache.blocks[0][block], offset):
                view.view(f"u{view.itemsize}")[:] = np.iinfo(f"u{view.itemsize}").max  # NaN in every type
        assert cache.step((0, t, t + 1)).tobytes() == expected[t - first], t


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_to_nearest_even(tier: str, dtype: str) -> None:
    """Every rounding case of the value path, which is stored as it comes: ties, subnormals, overflow, zeros."""
    rng = np.random.default_rng(4)
    shape = replace(BASE, num_heads=1, num_kv_heads=1, kv_dtype=dtype)
    exact = from_kv_dtype(rng.integers(0, 0x7BFF, (64, 64)).astype(np.uint16).view(np.uint16), "bfloat16")
    if dtype == "float16":
        exact = rng.integers(0, 0x7BFF, (64, 64)).astype(np.uint16).view(np.float16).astype(np.float32)
    exact[np.abs(exact) > 6e4] = 1.0
    near = exact.view(np.uint32) + rng.choice([0, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], (64, 64))
    values = near.astype(np.uint32).view(np.float32) * rng.choice([-1.0, 1.0], (64, 64)).astype(np.float32)
    tokens = np.zeros((64, 3 * 64), np.float32)
    tokens[:, 128:] = values
    cache = Cache(shape, [tokens], tier)
    inputs = cache.inputs([(0, 0, 64)])
    cache.run(inputs)
    with np.errstate(over="ignore"):
        _, expected = paged_attention(cache.shape, inputs)
    assert (cache.memory == expected).all()


def test_a_cache_bound_apart_is_copied() -> None:
    """kv_cache_out in other memory than kv_cache: the result is the same and the input is left alone."""
    cache = Cache(BASE, make_tokens(BASE, 20), TIERS[-1])
    inputs = cache.inputs([(0, 0, 20)])
    shared = cache.run(inputs)
    outputs = {"out": (20, 9 * 64), "kv_cache_out": cache.memory.shape}
    apart = run_op("PagedAttention", inputs, BASE.attributes(), outputs=outputs, tier=TIERS[-1])
    assert apart["out"].tobytes() == shared.tobytes()
    assert (apart["kv_cache_out"] == cache.memory).all()
    assert inputs["kv_cache"] is not None and (inputs["kv_cache"] == 0xFF).all()


def test_no_tokens() -> None:
    for steps in ([], [(0, 5, 5)]):
        cache = Cache(BASE, make_tokens(BASE, 5), TIERS[-1])
        before = cache.memory.copy()
        assert cache.step(*steps).shape == (0, 9 * 64)
        assert (cache.memory == before).all()


BAD_INPUTS: dict[str, tuple[str, Any, str]] = {
    "position": ("positions", [1, 2, 4], r"positions\[2\]: expected 3 .*, got 4"),
    "negative_position": ("positions", [-1, 2, 3], r"positions\[0\]: expected 1 .*, got -1"),
    "slot_high": ("slot_mapping", [0, 0, 64], r"slot_mapping\[2\]: expected -1 to 47, got 64"),
    "slot_low": ("slot_mapping", [0, -2, 0], r"slot_mapping\[1\]: expected -1 to 47, got -2"),
    "block_high": ("block_table", [[3, 0]], r"block_table\[0\]\[0\]: expected 0 to 2, got 3"),
    "block_low": ("block_table", [[-1, 0]], r"block_table\[0\]\[0\]: expected 0 to 2, got -1"),
    "block_table_narrow": ("block_table", np.zeros((1, 0)), r"block_table: expected at least 1 columns"),
    "block_table_rows": ("block_table", [[1], [1]], r"block_table: expected shape \[1, any\], got \[2, 1\]"),
    "seq_len": ("seq_lens", [2], r"seq_lens\[0\]: expected at least the request's 3 scheduled tokens, got 2"),
    "start": ("query_start_loc", [1, 3], r"query_start_loc\[0\]: expected 0, got 1"),
    "end": ("query_start_loc", [0, 2], r"positions\[0\]|query_start_loc\[1\]: expected the number of tokens"),
    "end_high": ("query_start_loc", [0, 4], r"query_start_loc\[1\]: expected 0 to 3, got 4"),
    "descending": ("query_start_loc", [0, -1], r"query_start_loc\[1\]: expected 0 to 3, got -1"),
    "dtype_code": ("kv_layout", [5, 16], r"kv_layout\[0\]: expected a KV dtype code among 0, 1, 2, [34], got 5"),
    "block_size": ("kv_layout", [0, 0], r"kv_layout\[1\]: expected a block size of at least 1, got 0"),
    "block_bytes": ("kv_layout", [0, 17], r"kv_cache: expected blocks of at least"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs_are_named(name: str) -> None:
    key, value, message = BAD_INPUTS[name]
    cache = Cache(BASE, make_tokens(BASE, 4), TIERS[-1])
    inputs = cache.inputs([(0, 1, 4)])
    inputs[key] = np.array(value, np.int32)
    with pytest.raises(Exception, match=message):
        cache.run(inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 10}, r"attribute 'num_heads': expected a multiple of num_kv_heads = 3 up to 16384, got 10"),
        ({"head_dim": 60}, r"attribute 'head_dim': expected a multiple of 8 up to 512, got 60"),
        ({"head_dim": 520}, r"attribute 'head_dim'"),
        ({"sliding_window": -1}, r"attribute 'sliding_window'"),
        ({"soft_cap": -1.0}, r"attribute 'soft_cap'"),
        ({"rope_interleaved": 2}, r"attribute 'rope_interleaved': expected 0 or 1, got 2"),
        ({"kv_offset": -1}, r"attribute 'kv_offset'"),
    ],
)
def test_bad_attributes_are_named(change: dict[str, Any], message: str) -> None:
    cache = Cache(BASE, make_tokens(BASE, 4), TIERS[-1])
    inputs = cache.inputs([(0, 0, 4)])
    cache.shape = replace(BASE, **change)
    with pytest.raises(Exception, match=message):
        cache.run(inputs)


def test_a_layer_beyond_64_bits_of_bytes_is_refused() -> None:
    """The end of this layer is byte 2^64 of a block, which wraps around to the end of an empty one."""
    cache = Cache(BASE, make_tokens(BASE, 4), TIERS[-1])
    inputs = cache.inputs([(0, 0, 4)])
    cache.shape = replace(cache.shape, kv_offset=2**32 - 2 * 3 * 64)
    cache.memory = np.zeros((3, 0), np.uint8)
    inputs |= {"kv_layout": np.array([0, 2**30], np.int32), "kv_cache": cache.memory}
    with pytest.raises(Exception, match=r"kv_cache: expected blocks of at least 4294967296 \* 4294967296 bytes"):
        cache.run(inputs)


def test_rotary_dim_is_checked() -> None:
    cache = Cache(BASE, make_tokens(BASE, 4), TIERS[-1])
    inputs = cache.inputs([(0, 0, 4)])
    inputs["cos_sin"] = np.zeros((4, 66), np.float32)
    with pytest.raises(Exception, match=r"cos_sin: expected an even rotary_dim of at most head_dim = 64"):
        cache.run(inputs)
