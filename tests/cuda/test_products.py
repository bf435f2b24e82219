"""QMatMul, LogitsHead and EmbedTokens on a CUDA device against NumPy: all formats, few and many rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from trivet.backends.contract.formats import FORMATS
from trivet.backends.cuda.device import probe_devices

from ..kernels import reference
from ..kernels.single_op import CUDA_TIER, run_op
from ..kernels.sizes import sized
from .require import needs_device

Array = NDArray[Any]
pytestmark = needs_device

EPSILON = 2.0**-24
BFLOAT16 = 2.0**-8  # roundings of a weight and of an activation to bfloat16, half a unit in the last place each
ROWS = sized((1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65, 130, 300), (1, 2, 4, 7, 9, 17, 65, 130))


def few_rows(fmt: str) -> int:
    """Steps of up to so many rows do not go to tensor cores."""
    if fmt in reference.FLOAT_FORMATS:
        return 4
    return 8 if probe_devices()["devices"][0]["sm"] == 90 else 16


def takes_tensor_cores(fmt: str, activation_dtype: str, rows: int) -> bool:
    return activation_dtype == "int8" and fmt != "f32" and rows > few_rows(fmt)


def smallest_k(fmt: str) -> int:
    return max(FORMATS[fmt].block_size, 32)


def qmatmul(x: Array, weights: list[tuple[str, Array]], **options: Any) -> Array:
    epilogue, bias = options.pop("epilogue", "none"), options.pop("bias", None)
    sizes = [w.shape[0] for _, w in weights]
    attributes = {
        "formats": ",".join(fmt for fmt, _ in weights),
        "in_features": x.shape[1],
        "out_features": sizes,
        "epilogue": epilogue,
    }
    inputs = {"x": x, "bias": bias} | {f"w{i}": w for i, (_, w) in enumerate(weights)}
    columns = sum(sizes) if epilogue == "none" else sizes[0]
    return run_op("QMatMul", inputs, attributes, outputs={"y": (len(x), columns)}, tier=CUDA_TIER, **options)["y"]


def bound(fmt: str, activation_dtype: str, rows: int, k: int, magnitude: Array) -> Array:
    """Rounding errors of float32 sums, or of bfloat16 operands, times what is rounded."""
    relative = (k / 32 + 40) * EPSILON
    if takes_tensor_cores(fmt, activation_dtype, rows):
        relative += BFLOAT16
    return np.asarray(relative * magnitude + 1e-30)


@pytest.mark.parametrize("activation_dtype", ["int8", "float32"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_qmatmul_is_close_to_the_exact_product(fmt: str, activation_dtype: str) -> None:
    rng = np.random.default_rng(1)
    block = smallest_k(fmt)
    wide = sized(max(1184, 5 * block), 5 * block) // block * block
    shapes = [(rows, n, k) for rows in ROWS for n, k in ((33, 3 * block), (130, wide))]
    shapes += [(0, 16, block), (1, 1, block), (20, 1, block), (129, 257, block)]
    shapes += [(rows, 40, 4352) for rows in (1, 2, 5)]  # several slices of a row
    if fmt in reference.FLOAT_FORMATS:
        shapes += [(3, 5, 1), (5, 18, 37), (40, 18, 37), (40, 130, 72), (300, 290, 136)]
        shapes += [(1, 9, 16648), (3, 9, 16648)]  # too long for a warp per slice of a row
    if fmt == "bf16":
        shapes += sized([(16, 4100, 2048), (64, 17000, 1032), (129, 6001, 256), (2100, 520, 128)], [(64, 520, 1032)])
    for rows, n, k in shapes:
        x = rng.standard_normal((rows, k), np.float32)
        w = reference.random_weight(fmt, n, k, rng)
        int8 = activation_dtype == "int8" and not takes_tensor_cores(fmt, activation_dtype, rows)
        expected, magnitude = reference.matmul(x, fmt, w, "int8" if int8 else "float32")
        got = qmatmul(x, [(fmt, w)], activation_dtype=activation_dtype)
        error = np.abs(got - expected)
        assert (error <= bound(fmt, activation_dtype, rows, k, magnitude)).all(), (rows, n, k, error.max())


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_does_not_depend_on_its_company(fmt: str) -> None:
    """With float32 activations always; with int8 ones among steps of the same path."""
    rng = np.random.default_rng(3)
    k = 3 * smallest_k(fmt)
    x = rng.standard_normal((61, k), np.float32)
    weights = [(fmt, reference.random_weight(fmt, 130, k, rng))]
    few = few_rows(fmt)
    together = sized((1, 2, 3, 7, 20, 61), (1, 3, 61))
    for dtype, sizes in (("float32", together), ("int8", (20, 30, 61)), ("int8", (1, 2, 3, few))):
        whole = qmatmul(x[: max(sizes)], weights, activation_dtype=dtype)
        for size in sizes:
            part = qmatmul(x[:size], weights, activation_dtype=dtype)
            np.testing.assert_array_equal(part, whole[:size], err_msg=f"{dtype} {size}")


def test_merged_weights_of_different_formats_with_bias_are_the_single_products() -> None:
    rng = np.random.default_rng(4)
    names = list(FORMATS)
    for rows in (1, 6, 40, 140):
        x = rng.standard_normal((rows, 512), np.float32)
        for i in range(0, len(names), sized(2, 4)):
            picked = [(names[(i + step) % len(names)], n) for step, n in ((0, 40), (1, 7), (5, 16))]
            weights = [(fmt, reference.random_weight(fmt, n, 512, rng)) for fmt, n in picked]
            bias = rng.standard_normal(63).astype(np.float32)
            single = np.concatenate([qmatmul(x, [w]) for w in weights], axis=1)
            np.testing.assert_array_equal(qmatmul(x, weights, bias=bias), single + bias)


@pytest.mark.parametrize(("epilogue", "function"), [("swiglu", reference.silu), ("geglu", reference.gelu_tanh)])
@pytest.mark.parametrize("formats", [("q4_k", "q6_k"), ("q4_0", "q4_0"), ("q6_k", "q6_k"), ("bf16", "bf16")])
def test_gated_epilogues(epilogue: str, function: Any, formats: tuple[str, str]) -> None:
    rng = np.random.default_rng(5)
    for rows in (1, 5, 33, 140):
        x = rng.standard_normal((rows, 256), np.float32)
        for n, bias in [(64, None), (37, rng.standard_normal(74).astype(np.float32) * 30)]:
            weights = [(fmt, reference.random_weight(fmt, n, 256, rng)) for fmt in formats]
            gate, up = np.split(qmatmul(x, weights, bias=bias).astype(np.float64), 2, axis=1)
            expected = function(gate) * up
            got = qmatmul(x, weights, bias=bias, epilogue=epilogue)
            # In the tail e^x turns the rounding of its argument (up to 88) into a relative error.
            tail = np.abs(expected) < 1e-3 * np.abs(gate * up)
            limit = np.where(tail, 1600, 64) * EPSILON * np.abs(expected) + 1e-37 * np.abs(gate * up)
            assert (np.abs(got - expected) <= limit).all()


@pytest.mark.parametrize("fmt", ["q4_k", "q5_k", "q6_k", "q8_0"])
def test_gated_pairs_of_long_rows(fmt: str) -> None:
    """A block has the ring of its slices and the sums of 32 columns, as much shared memory as some devices have."""
    rng = np.random.default_rng(8)
    for rows, k in ((8, 16384), (1, 16384), (8, sized(28672, 14592)), (3, sized(22528, 14592))):
        x = rng.standard_normal((rows, k), np.float32)
        weights = [(fmt, reference.random_weight(fmt, 64, k, rng)) for _ in range(2)]
        gate, up = np.split(qmatmul(x, weights).astype(np.float64), 2, axis=1)
        expected = reference.silu(gate) * up
        got = qmatmul(x, weights, epilogue="swiglu")
        assert (np.abs(got - expected) <= 1600 * EPSILON * np.abs(expected) + 1e-37 * np.abs(gate * up)).all()


@pytest.mark.parametrize("fmt", reference.BLOCK_FORMATS)
def test_zero_tiny_and_non_finite_activations(fmt: str) -> None:
    """As int8: few rows at a time."""
    rng = np.random.default_rng(6)
    k = 2 * smallest_k(fmt)
    x = rng.standard_normal((6, k), np.float32)
    x[0] = 0
    x[2] *= np.float32(1e-37)  # 127 / max|x| would overflow: counts as zero
    x[3, 5] = np.inf
    x[4, k - 1] = np.nan
    w = reference.random_weight(fmt, 20, k, rng)
    got = np.concatenate([qmatmul(rows, [(fmt, w)]) for rows in (x[:3], x[3:])])
    assert (got[[0, 2]] == 0).all() and np.isnan(got[[3, 4]]).all() and np.isfinite(got[[1, 5]]).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_logits_head(fmt: str) -> None:
    rng = np.random.default_rng(7)
    k = 2 * smallest_k(fmt)
    x = rng.standard_normal((40, k), np.float32)
    w = reference.random_weight(fmt, 1031, k, rng)
    attributes = {"format": fmt, "in_features": k, "vocab_size": 1031}
    for rows in (0, 1, 3, 30):
        inputs, outputs = {"x": x[:rows], "weight": w}, {"logits": (rows, 1031)}
        plain = run_op("LogitsHead", inputs, attributes | {"soft_cap": 0.0}, outputs=outputs, tier=CUDA_TIER)["logits"]
        np.testing.assert_array_equal(plain, qmatmul(x[:rows], [(fmt, w)]))
        capped = run_op("LogitsHead", inputs, attributes | {"soft_cap": 3.0}, outputs=outputs, tier=CUDA_TIER)["logits"]
        np.testing.assert_allclose(capped, reference.soft_cap(plain.astype(np.float64), 3.0), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("fmt", FORMATS)
def test_embed_tokens(fmt: str) -> None:
    rng = np.random.default_rng(8)
    dim = 2 * smallest_k(fmt)
    w = reference.random_weight(fmt, 50, dim, rng)
    attributes = {"format": fmt, "dim": dim, "scale": 1.5}
    for ids in ([], [49], [0, 3, 3, 49, 7]):
        inputs = {"input_ids": np.array(ids, np.int32), "weight": w}
        got = run_op("EmbedTokens", inputs, attributes, outputs={"hidden": (len(ids), dim)}, tier=CUDA_TIER)["hidden"]
        np.testing.assert_array_equal(got, reference.dequantize(fmt, w)[ids] * np.float32(1.5))


@pytest.mark.parametrize("bad", [-1, 50])
def test_ids_outside_the_table_are_errors(bad: int) -> None:
    weight = reference.random_weight("q8_0", 50, 32, np.random.default_rng(10))
    ids = np.array([1, bad], np.int32)
    attributes: dict[str, Any] = {"format": "q8_0", "dim": 32, "scale": 1.0}
    with pytest.raises(Exception, match=rf"EmbedTokens .*input_ids\[1\]: expected an id from 0 to 49, got {bad}"):
        run_op(
            "EmbedTokens", {"input_ids": ids, "weight": weight}, attributes, outputs={"hidden": (2, 32)}, tier=CUDA_TIER
        )
    # The session goes on after an error.
    good = {"input_ids": np.array([1], np.int32), "weight": weight}
    run_op("EmbedTokens", good, attributes, outputs={"hidden": (1, 32)}, tier=CUDA_TIER)
