"""RMSNorm and AddRMSNorm in every tier against NumPy float64, relative to the largest element of the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .reference_attention import add_rms_norm, rms_norm
from .single_op import available_tiers, run_op

Array = NDArray[Any]
TIERS = available_tiers()
BOUND = 1e-6
SHAPES = [(0, 64), (1, 1), (1, 7), (3, 15), (2, 16), (5, 33), (1, 576), (300, 577), (2, 8192)]


def run_norm(x: Array, weight: Array, tier: str, *, num_threads: int = 2) -> Array:
    result = run_op(
        "RMSNorm",
        {"x": x, "weight": weight},
        {"eps": 1e-5},
        outputs={"y": x.shape},
        tier=tier,
        num_threads=num_threads,
    )
    return result["y"]


def run_add_norm(
    x: Array, residual: Array, weight: Array, post: Array | None, tier: str, rows: Array | None = None
) -> tuple[Array, Array]:
    shape = (len(x if rows is None else rows), x.shape[1])
    result = run_op(
        "AddRMSNorm",
        {"x": x, "residual": residual, "weight": weight, "post_weight": post, "rows": rows},
        {"eps": 1e-6},
        outputs={"y": shape, "residual_out": shape},
        tier=tier,
    )
    return result["y"], result["residual_out"]


def assert_close(got: Array, expected: Array) -> None:
    scale = np.abs(expected).max(axis=-1, keepdims=True, initial=1e-30)
    assert (np.abs(got - expected) <= BOUND * scale).all()


def random_arrays(shape: tuple[int, int], count: int) -> list[Array]:
    rng = np.random.default_rng(shape)
    return [(rng.standard_normal(shape) * rng.uniform(0.1, 50)).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(tier: str, shape: tuple[int, int]) -> None:
    (x,) = random_arrays(shape, 1)
    (weight,) = random_arrays((1, shape[1]), 1)
    assert_close(run_norm(x, weight[0], tier), rms_norm(x, weight[0], 1e-5))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("with_post", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(tier: str, shape: tuple[int, int], with_post: bool) -> None:
    x, residual = random_arrays(shape, 2)
    weight, post = (a[0] for a in random_arrays((1, shape[1]), 2))
    y, total = run_add_norm(x, residual, weight, post if with_post else None, tier)
    expected_y, expected_total = add_rms_norm(x, residual, weight, post if with_post else None, 1e-6)
    assert_close(total, expected_total)
    assert_close(y, expected_y)


ROWS: list[tuple[tuple[int, int], list[int]]] = [
    ((0, 64), []),
    ((7, 64), []),
    ((1, 7), [0]),
    ((5, 33), [4, 0, 0, 2, 4]),
    ((5, 64), [3]),
    ((2, 8192), [1, 1, 0]),
    ((300, 577), list(range(299, 0, -2))),
    ((40, 1152), [39, *range(30)]),
]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("with_post", [False, True])
@pytest.mark.parametrize(("shape", "rows"), ROWS, ids=[f"{len(r)}-of-{s[0]}x{s[1]}" for s, r in ROWS])
def test_add_rms_norm_of_some_rows(tier: str, shape: tuple[int, int], with_post: bool, rows: list[int]) -> None:
    """In any order, also more than once or none at all; a row has the bits that it has among all of them."""
    x, residual = random_arrays(shape, 2)
    weight, post = (a[0] for a in random_arrays((1, shape[1]), 2))
    norm, index = post if with_post else None, np.array(rows, np.int32)
    y, total = run_add_norm(x, residual, weight, norm, tier, index)
    expected_y, expected_total = add_rms_norm(x, residual, weight, norm, 1e-6, index)
    assert y.shape == expected_y.shape == (len(rows), shape[1])
    assert_close(total, expected_total)
    assert_close(y, expected_y)
    whole_y, whole_total = run_add_norm(x, residual, weight, norm, tier)
    assert y.tobytes() == whole_y[index].tobytes()
    assert total.tobytes() == whole_total[index].tobytes()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("n", [64, 100, 256])
@pytest.mark.parametrize("bad", [-1, 5, 1 << 30])
def test_a_row_outside_of_x_is_an_error(tier: str, n: int, bad: int) -> None:
    x, weight = np.ones((5, n), np.float32), np.ones(n, np.float32)
    with pytest.raises(Exception, match=rf"AddRMSNorm .*rows\[1\]: expected a row of x from 0 to 4, got {bad}"):
        run_add_norm(x, x, weight, None, tier, np.array([1, bad], np.int32))
    y, total = run_add_norm(x, x, weight, None, tier, np.array([1, 4], np.int32))  # the session goes on
    assert (total == 2).all() and np.allclose(y, 1, rtol=1e-6)


@pytest.mark.parametrize("shape", [(9, 100), (200, 577)])
def test_bits_do_not_depend_on_batch_threads_or_tier(shape: tuple[int, int]) -> None:
    (x,) = random_arrays(shape, 1)
    weight = random_arrays((1, shape[1]), 1)[0][0]
    whole = run_norm(x, weight, TIERS[0], num_threads=1)
    for tier in TIERS:
        assert run_norm(x, weight, tier).tobytes() == whole.tobytes()
        alone = np.concatenate([run_norm(x[i : i + 1], weight, tier) for i in range(0, shape[0], 7)])
        assert alone.tobytes() == whole[::7].tobytes()


def test_zeros_and_large_values_stay_finite() -> None:
    x = np.zeros((2, 64), np.float32)
    x[1] = 1e15
    for tier in TIERS:
        y = run_norm(x, np.ones(64, np.float32), tier)
        assert (y[0] == 0).all()
        np.testing.assert_allclose(y[1], 1.0, rtol=BOUND)


def test_bad_inputs_are_named() -> None:
    x, weight = np.ones((2, 8), np.float32), np.ones(8, np.float32)
    with pytest.raises(Exception, match=r"weight: expected shape \[8\], got \[7\]"):
        run_norm(x, weight[:7], TIERS[-1])
    with pytest.raises(Exception, match=r"residual: expected shape \[2, 8\], got \[1, 8\]"):
        run_add_norm(x, x[:1], weight, None, TIERS[-1])
    with pytest.raises(Exception, match=r"post_weight: expected shape \[8\]"):
        run_add_norm(x, x, weight, weight[:3], TIERS[-1])
    with pytest.raises(Exception, match=r"rows: expected shape \[any\], got \[1, 1\]"):
        run_add_norm(x, x, weight, None, TIERS[-1], np.zeros((1, 1), np.int32))
    with pytest.raises(Exception, match=r"rows: expected none, as x has none, got 3"):
        run_add_norm(x[:0], x[:0], weight, None, TIERS[-1], np.zeros(3, np.int32))
    with pytest.raises(Exception, match=r"attribute 'eps': expected a finite number from 0, got -1"):
        run_op("RMSNorm", {"x": x, "weight": weight}, {"eps": -1.0}, outputs={"y": x.shape}, tier=TIERS[-1])
