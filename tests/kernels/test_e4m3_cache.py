"""PagedAttention over a cache of fp8_e4m3 on a CUDA device; the CPU refuses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from .attention_cache import BASE, Cache, check_against_reference, check_batching, make_tokens
from .reference_attention import E4M3_VALUES, AttentionShape, paged_attention
from .single_op import CUDA_TIER, available_tiers

TIER = available_tiers()[-1]
on_cuda = pytest.mark.skipif(TIER != CUDA_TIER, reason="fp8_e4m3 is for CUDA devices")
E4M3 = replace(BASE, kv_dtype="fp8_e4m3")
VARIANTS: dict[str, tuple[AttentionShape, dict[str, Any]]] = {
    "fp8": (E4M3, {}),
    "fp8_16": (replace(E4M3, num_heads=2, num_kv_heads=1, head_dim=16, block_size=1), {}),
    "fp8_80": (replace(E4M3, num_heads=2, num_kv_heads=2, head_dim=80), {"rotary_dim": 32}),
    "fp8_96": (replace(E4M3, num_heads=6, num_kv_heads=2, head_dim=96, soft_cap=20.0), {"sinks": True}),
    "fp8_128": (replace(E4M3, num_heads=8, num_kv_heads=2, head_dim=128, sliding_window=70), {"norms": True}),
    "fp8_256": (replace(E4M3, num_heads=4, num_kv_heads=1, head_dim=256, scale=0.0625), {"norms": True}),
    "fp8_512": (replace(E4M3, num_heads=1, num_kv_heads=1, head_dim=512, scale=0.04), {}),
    "fp8_second_layer": (replace(E4M3, kv_offset=384, elements_per_token=1200), {}),
}


@on_cuda
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_reference(name: str) -> None:
    shape, options = VARIANTS[name]
    check_against_reference(shape, TIER, options)


@on_cuda
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_do_not_depend_on_batching(name: str) -> None:
    shape, options = VARIANTS[name]
    check_batching(shape, TIER, options)


@on_cuda
def test_e4m3_is_rounded_to_nearest_even_and_saturates() -> None:
    """Every number of the type, every tie between two of them and its neighbours, and what is too large."""
    rng = np.random.default_rng(4)
    finite = E4M3_VALUES[:0x7F]
    ties = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    large = np.array([449, 463.9, 464, 480, 1e6, 3e38, np.inf], np.float32)
    near = np.concatenate([finite, ties, np.nextafter(ties, 0), np.nextafter(ties, np.float32(1e3)), large])
    values = np.concatenate([near, -near, rng.permutation(near)])
    tokens = np.zeros((80, 3 * 64), np.float32)
    tokens[:, 128:] = np.resize(values, (80, 64))
    for rows in (tokens, tokens[:30]):  # a long step and a short one
        cache = Cache(replace(E4M3, num_heads=1, num_kv_heads=1), [rows], TIER)
        inputs = cache.inputs([(0, 0, len(rows))])
        cache.run(inputs)
        assert (cache.memory == paged_attention(cache.shape, inputs)[1]).all()


@on_cuda
def test_heads_that_e4m3_cannot_have_are_refused() -> None:
    shape = replace(E4M3, num_heads=2, num_kv_heads=2, head_dim=24)
    with pytest.raises(Exception, match=r"attribute 'head_dim': expected a multiple of 16 for this KV dtype, got 24"):
        Cache(shape, make_tokens(shape, 4), TIER).step((0, 0, 4))


@pytest.mark.skipif(TIER == CUDA_TIER, reason="CUDA devices have it")
def test_the_cpu_refuses_e4m3() -> None:
    with pytest.raises(Exception, match=r"kv_layout\[0\]: expected a KV dtype code among 0, 1, 2, 4, got 3"):
        Cache(E4M3, make_tokens(E4M3, 4), TIER).step((0, 0, 4))
