"""PagedAttention over a cache of int16_per_token_head: in the tiers that have it, and refused by the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from .attention_cache import BASE, Cache, check_against_reference, check_batching, make_tokens
from .reference_attention import AttentionShape, paged_attention
from .single_op import CUDA_TIER, available_tiers

TIERS = [tier for tier in available_tiers() if tier != CUDA_TIER]
WITH = [tier for tier in TIERS if tier.startswith("avx512")]
WITHOUT = [tier for tier in TIERS if tier not in WITH]
needs_vnni = pytest.mark.skipif(not WITH, reason="no tier of this CPU has an int16_per_token_head cache")
INT16 = replace(BASE, kv_dtype="int16_per_token_head")
VARIANTS: dict[str, tuple[AttentionShape, dict[str, Any]]] = {
    "smollm2": (INT16, {}),
    "mqa_7": (replace(INT16, num_heads=7, num_kv_heads=1, head_dim=32), {}),
    "mha_16": (replace(INT16, num_heads=2, num_kv_heads=2, head_dim=16, block_size=32), {}),
    "head_80": (replace(INT16, num_heads=2, num_kv_heads=2, head_dim=80), {"rotary_dim": 32}),
    "head_128": (replace(INT16, num_heads=8, num_kv_heads=2, head_dim=128, soft_cap=20.0), {"sinks": True}),
    "head_256": (replace(INT16, num_heads=4, num_kv_heads=1, head_dim=256, scale=0.0625), {"norms": True}),
    "head_512": (replace(INT16, num_heads=1, num_kv_heads=1, head_dim=512, scale=0.04), {}),
    "block_48": (replace(INT16, num_heads=14, num_kv_heads=2, block_size=48), {}),
    "window_5": (replace(INT16, sliding_window=5), {}),
    "window_70": (replace(INT16, head_dim=128, sliding_window=70, soft_cap=5.0), {"sinks": True, "norms": True}),
    "second_layer": (replace(INT16, kv_offset=384, elements_per_token=1152), {}),
}


@needs_vnni
@pytest.mark.parametrize("tier", WITH)
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_reference(name: str, tier: str) -> None:
    shape, options = VARIANTS[name]
    check_against_reference(shape, tier, options)


@needs_vnni
@pytest.mark.parametrize("tier", WITH)
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_do_not_depend_on_batching(name: str, tier: str) -> None:
    shape, options = VARIANTS[name]
    check_batching(shape, tier, options)


@needs_vnni
@pytest.mark.parametrize("name", ["smollm2", "mqa_7", "head_128", "head_512", "window_5"])
def test_it_is_about_as_exact_as_float16(name: str) -> None:
    """Against attention over keys and values that nothing has rounded; bfloat16 is several times further away."""
    shape, options = VARIANTS[name]
    errors = {}
    for dtype in ("int16_per_token_head", "float16", "bfloat16"):
        stored = Cache(replace(shape, kv_dtype=dtype), make_tokens(shape, 300), WITH[-1], **options)
        unrounded = Cache(replace(shape, kv_dtype="float32"), stored.tokens, WITH[-1], **options)
        exact, _ = paged_attention(unrounded.shape, unrounded.inputs([(0, 0, 300)]))
        errors[dtype] = float(np.sqrt(np.mean((stored.step((0, 0, 300)) - exact) ** 2)))
    assert errors["int16_per_token_head"] < 1.5 * errors["float16"]
    assert errors["int16_per_token_head"] < errors["bfloat16"] / 3


@needs_vnni
@pytest.mark.parametrize("tier", WITH)
def test_the_largest_sums_do_not_overflow(tier: str) -> None:
    """Query and key point the same way along one axis, or along all; every value is the largest of its head."""
    shape = replace(INT16, num_heads=1, num_kv_heads=1, head_dim=512, scale=1e-4)
    for axis in (np.eye(512, dtype=np.float32)[0], np.ones(512, np.float32)):
        tokens = np.tile(np.concatenate([30 * axis, -200 * axis, np.full(512, 7, np.float32)]), (128, 1))
        cache = Cache(shape, [tokens], tier, rotary_dim=0)
        inputs = cache.inputs([(0, 0, 128)])
        np.testing.assert_allclose(cache.run(inputs), paged_attention(cache.shape, inputs)[0], rtol=1e-3)


@needs_vnni
@pytest.mark.parametrize("tier", WITH)
def test_zeros_and_tiny_numbers(tier: str) -> None:
    shape = replace(INT16, num_heads=1, num_kv_heads=1)
    tokens = make_tokens(shape, 40)[0]
    tokens[3, 64:] = 0.0
    tokens[5, 64:] = 1e-40
    tokens[7, :64] = 0.0
    tokens[11, 64:128] *= 1e-20
    cache = Cache(shape, [tokens], tier)
    inputs = cache.inputs([(0, 0, 40)])
    np.testing.assert_allclose(cache.run(inputs), paged_attention(cache.shape, inputs)[0], atol=5e-4)


@needs_vnni
@pytest.mark.parametrize("tier", WITH)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_what_is_no_number_reaches_the_output(part: str, bits: int, tier: str) -> None:
    """... of those rows that see it, so that the engine can refuse to sample from it, and of no others."""
    shape = replace(INT16, num_heads=1, num_kv_heads=1)
    tokens = make_tokens(shape, 40)
    clean = Cache(shape, tokens, tier).step((0, 0, 40))
    tokens[0].view(np.uint32)[21, {"query": 0, "key": 64, "value": 128}[part] + 5] = bits
    out = Cache(shape, tokens, tier).step((0, 0, 40))
    seen = slice(21, 22) if part == "query" else slice(21, 40)
    assert not np.isfinite(out[seen]).any(axis=1).any()
    assert out[:21].tobytes() == clean[:21].tobytes()
    assert part != "query" or out[22:].tobytes() == clean[22:].tobytes()


@needs_vnni
@pytest.mark.parametrize("window", [5, 64, 300])
def test_a_window_layer_reads_only_its_window(window: int) -> None:
    shape = replace(INT16, sliding_window=window)
    cache = Cache(shape, make_tokens(shape, 340), WITH[-1])
    cache.step((0, 0, 330))
    before = cache.memory.copy()
    expected = [cache.step((0, t, t + 1)).tobytes() for t in range(330, 340)]
    cache.memory = before
    for t in range(330, 340):
        for position in range(t + 1 - window):
            for view in shape.slot(cache.memory, cache.blocks[0][position // 16], position % 16):
                view.view(f"u{view.itemsize}")[:] = np.iinfo(f"u{view.itemsize}").max
        assert cache.step((0, t, t + 1)).tobytes() == expected[t - 330], t


@pytest.mark.parametrize("tier", WITHOUT)
def test_other_tiers_refuse_it(tier: str) -> None:
    with pytest.raises(Exception, match="an int16 cache needs the tier avx512_vnni"):
        Cache(INT16, make_tokens(INT16, 4), tier).step((0, 0, 4))


@needs_vnni
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 24}, r"attribute 'head_dim': expected a multiple of 16 for an int16 cache, got 24"),
        ({"block_size": 24}, r"kv_layout\[1\]: expected a block size that is a multiple of 16 .*, got 24"),
        ({"kv_offset": 100}, r"attribute 'kv_offset': expected a multiple of head_dim 64 for this KV dtype, got 100"),
    ],
)
def test_shapes_that_it_cannot_have_are_refused(change: dict[str, Any], message: str) -> None:
    shape = replace(INT16, **change)
    with pytest.raises(Exception, match=message):
        Cache(shape, make_tokens(shape, 4), WITH[-1]).step((0, 0, 4))
