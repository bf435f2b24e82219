"""QMatMul, LogitsHead and EmbedTokens against NumPy, over tiers, formats and shapes; outputs lie in guard bands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from trivet.backends.contract.formats import FORMATS
from trivet.backends.library import probe_cpu

from . import reference
from .single_op import available_tiers, run_op

Array = NDArray[Any]

TIERS = list(probe_cpu()["tiers"])
BLOCK_FORMATS = reference.BLOCK_FORMATS
EPSILON = 2.0**-24  # half a unit in the last place of float32, relative


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name not in available_tiers():
        pytest.skip(f"this CPU lacks {probe_cpu()['tiers'][name]} for tier {name}")
    return name


def smallest_k(fmt: str) -> int:
    return max(FORMATS[fmt].block_size, 32)


def shapes(fmt: str) -> list[tuple[int, int, int]]:
    """(rows, out_features, in_features): one block, tails in every dimension, more rows than are handled at a time."""
    block = smallest_k(fmt)
    found = [(0, 16, block), (1, 1, block), (1, 33, 3 * block), (7, 15, block), (9, 16, 2 * block)]
    # More blocks of 32 than are unpacked at a time, and not a multiple of it; the last columns are less than a tile.
    found += [(14, 50, 45 * 32 if block <= 32 else 9 * block), (55, 72, 9 * block), (259, 17, block)]
    if fmt in reference.FLOAT_FORMATS:
        found += [(3, 5, 1), (5, 18, 37)]
    return found


def qmatmul(x: Array, weights: list[tuple[str, Array]], tier: str, **options: Any) -> Array:
    epilogue = options.pop("epilogue", "none")
    bias = options.pop("bias", None)
    sizes = [w.shape[0] for _, w in weights]
    attributes = {
        "formats": ",".join(fmt for fmt, _ in weights),
        "in_features": x.shape[1],
        "out_features": sizes,
        "epilogue": epilogue,
    }
    inputs = {"x": x, "bias": bias} | {f"w{i}": w for i, (_, w) in enumerate(weights)}
    columns = sum(sizes) if epilogue == "none" else sizes[0]
    return run_op("QMatMul", inputs, attributes, outputs={"y": (len(x), columns)}, tier=tier, **options)["y"]


def error_bound(fmt: str, activation_dtype: str, columns: int, magnitude: Array) -> Array:
    """Roundings along the longest chain of a dot product, times the size of what is rounded.

    int8: two products, a conversion and a sum per scale, two more per minimum. float32: a conversion, a product and a
    sum per 16 columns, then 4 levels of the tree. NumPy's own scales cost a few more.
    """
    if fmt in BLOCK_FORMATS and activation_dtype == "int8":
        chain = columns / 32 * (2 if fmt in reference.HALVES else 1) + 8
    else:
        chain = columns / 16 + 4 + 6
    return np.asarray(chain * EPSILON * magnitude + 1e-30)


@pytest.mark.parametrize("activation_dtype", ["int8", "float32"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_qmatmul_is_close_to_the_exact_product(tier: str, fmt: str, activation_dtype: str) -> None:
    rng = np.random.default_rng(1)
    for rows, n, k in shapes(fmt):
        x = rng.standard_normal((rows, k), np.float32)
        w = reference.random_weight(fmt, n, k, rng)
        expected, magnitude = reference.matmul(x, fmt, w, activation_dtype)
        got = qmatmul(x, [(fmt, w)], tier, activation_dtype=activation_dtype)
        error = np.abs(got - expected)
        assert (error <= error_bound(fmt, activation_dtype, k, magnitude)).all(), (rows, n, k, error.max())


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_block_formats_give_the_stated_bits(tier: str, fmt: str) -> None:
    rng = np.random.default_rng(2)
    for rows, n, k in shapes(fmt):
        x = rng.standard_normal((rows, k), np.float32) * np.float32(10) ** rng.integers(-6, 6, (rows, 1)).astype("f4")
        w = reference.random_weight(fmt, n, k, rng)
        np.testing.assert_array_equal(qmatmul(x, [(fmt, w)], tier), reference.matmul_bits(x, fmt, w, tier))


@pytest.mark.parametrize("activation_dtype", ["int8", "float32"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_does_not_depend_on_its_company_or_on_threads(tier: str, fmt: str, activation_dtype: str) -> None:
    rng = np.random.default_rng(3)
    k, n = 3 * smallest_k(fmt), 130
    x = rng.standard_normal((261, k), np.float32)
    weights = [(fmt, reference.random_weight(fmt, n, k, rng))]
    whole = qmatmul(x, weights, tier, activation_dtype=activation_dtype, num_threads=1)
    parts = [(0, 1), (1, 3), (3, 10), (10, 200), (20, 28), (31, 36), (40, 57), (60, 84), (90, 115), (260, 261)]
    for start, stop in parts:
        part = qmatmul(x[start:stop], weights, tier, activation_dtype=activation_dtype, num_threads=3)
        np.testing.assert_array_equal(part, whole[start:stop], err_msg=f"rows {start}..{stop}")


def test_merged_weights_of_different_formats_with_bias_are_the_single_products(tier: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((6, 512), np.float32)
    names = list(FORMATS)
    for i in range(len(names)):
        weights = [
            (names[(i + step) % len(names)], reference.random_weight(names[(i + step) % len(names)], n, 512, rng))
            for step, n in ((0, 40), (1, 7), (5, 16))
        ]
        bias = rng.standard_normal(63).astype(np.float32)
        merged = qmatmul(x, weights, tier, bias=bias)
        single = np.concatenate([qmatmul(x, [w], tier) for w in weights], axis=1)
        np.testing.assert_array_equal(merged, single + bias)


@pytest.mark.parametrize(("epilogue", "function"), [("swiglu", reference.silu), ("geglu", reference.gelu_tanh)])
def test_gated_epilogues(tier: str, epilogue: str, function: Any) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((5, 256), np.float32)
    for n, bias in [(16, None), (37, rng.standard_normal(74).astype(np.float32) * 30)]:
        weights = [(fmt, reference.random_weight(fmt, n, 256, rng)) for fmt in ("q4_k", "q6_k")]
        gate, up = np.split(qmatmul(x, weights, tier, bias=bias).astype(np.float64), 2, axis=1)
        expected = function(gate) * up
        got = qmatmul(x, weights, tier, bias=bias, epilogue=epilogue)
        # A few roundings; in the tail e^x turns the rounding of its argument (up to 88) into a relative error, and the
        # kernels stop at e^-87, which leaves 1e-37 of gate * up where the exact value is smaller.
        tail = np.abs(expected) < 1e-3 * np.abs(gate * up)
        bound = np.where(tail, 800, 16) * EPSILON * np.abs(expected) + 1e-37 * np.abs(gate * up)
        assert (np.abs(got - expected) <= bound).all()
        if tier != "baseline":  # whose products are others, see ARCHITECTURE.md
            np.testing.assert_array_equal(got, qmatmul(x, weights, "scalar", bias=bias, epilogue=epilogue))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_zero_tiny_and_non_finite_activations(tier: str, fmt: str) -> None:
    rng = np.random.default_rng(6)
    k = 2 * smallest_k(fmt)
    x = rng.standard_normal((6, k), np.float32)
    x[0] = 0
    x[1, :32] = 0
    x[2] *= np.float32(1e-37)  # 127 / max|x| would overflow: counts as zero
    x[3, 5] = np.inf
    x[4, k - 1] = np.nan
    w = reference.random_weight(fmt, 20, k, rng)
    got = qmatmul(x, [(fmt, w)], tier)
    assert (got[[0, 2]] == 0).all()
    np.testing.assert_array_equal(got[[1, 5]], reference.matmul_bits(x[[1, 5]], fmt, w, tier))
    assert np.isnan(got[[3, 4]]).all()


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_extreme_integers_do_not_saturate(tier: str, fmt: str) -> None:
    """All bits set or clear, activations at the end of their range and of one sign or alternating."""
    k = smallest_k(fmt)
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        w = np.full((16, FORMATS[fmt].row_bytes(k)), fill, np.uint8)
        blocks = w.reshape(16, -1, FORMATS[fmt].block_bytes)
        for offset in reference.HALF_OFFSETS[fmt]:
            blocks[:, :, offset : offset + 2] = np.array([1.0], np.float16).view(np.uint8)
        x = np.ones((3, k), np.float32)
        x[1] = -1
        x[2, ::2] = -1
        expected = reference.matmul_bits(x, fmt, w, tier)
        np.testing.assert_array_equal(qmatmul(x, [(fmt, w)], tier), expected)
        for i in range(3):  # one row has kernels of its own
            np.testing.assert_array_equal(qmatmul(x[i : i + 1], [(fmt, w)], tier), expected[i : i + 1])


@pytest.mark.parametrize("fmt", FORMATS)
def test_logits_head(tier: str, fmt: str) -> None:
    rng = np.random.default_rng(7)
    k = 2 * smallest_k(fmt)
    x = rng.standard_normal((9, k), np.float32)
    w = reference.random_weight(fmt, 1031, k, rng)
    attributes = {"format": fmt, "in_features": k, "vocab_size": 1031}
    for rows in (0, 1, 9):
        inputs, outputs = {"x": x[:rows], "weight": w}, {"logits": (rows, 1031)}
        plain = run_op("LogitsHead", inputs, attributes | {"soft_cap": 0.0}, outputs=outputs, tier=tier)["logits"]
        np.testing.assert_array_equal(plain, qmatmul(x[:rows], [(fmt, w)], tier))
        capped = run_op("LogitsHead", inputs, attributes | {"soft_cap": 3.0}, outputs=outputs, tier=tier)["logits"]
        np.testing.assert_allclose(capped, reference.soft_cap(plain.astype(np.float64), 3.0), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("fmt", FORMATS)
def test_embed_tokens(tier: str, fmt: str) -> None:
    rng = np.random.default_rng(8)
    dim = 2 * smallest_k(fmt)
    w = reference.random_weight(fmt, 50, dim, rng)
    attributes = {"format": fmt, "dim": dim, "scale": 1.5}
    for ids in ([], [49], [0, 3, 3, 49, 7]):
        inputs = {"input_ids": np.array(ids, np.int32), "weight": w}
        got = run_op("EmbedTokens", inputs, attributes, outputs={"hidden": (len(ids), dim)}, tier=tier)["hidden"]
        np.testing.assert_array_equal(got, reference.dequantize(fmt, w)[ids] * np.float32(1.5))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_the_reference_reads_blocks_as_the_gguf_package_does(fmt: str) -> None:
    gguf = pytest.importorskip("gguf")
    w = reference.random_weight(fmt, 6, 512, np.random.default_rng(9))
    known = gguf.quants.dequantize(w, gguf.GGMLQuantizationType[fmt.upper()])
    np.testing.assert_allclose(reference.dequantize(fmt, w), known, rtol=1e-6, atol=1e-7)


GOOD = {"formats": "q4_0", "in_features": 64, "out_features": [4], "epilogue": "none"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formats": "q3_k"}, "unknown weight format 'q3_k', known: f32, f16"),
        ({"in_features": 48}, "expected a positive multiple of the q4_0 block size 32, got 48"),
        ({"epilogue": "relu"}, "expected none, swiglu or geglu, got 'relu'"),
        ({"epilogue": "swiglu"}, "needs two weights of the same out_features"),
        ({"out_features": [4, 4]}, "expected one entry per weight, 1 to 3, got 1 and 2"),
        ({"out_features": [5]}, r"w0: expected shape \[5, 36\], got \[4, 36\]"),
        ({"in_features": 96}, r"x: expected shape \[any, 96\], got \[2, 64\]"),
        ({"formats": "q4_0,q4_0", "out_features": [4, 4]}, "w1: expected 2 weights"),
    ],
)
def test_qmatmul_names_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    inputs: dict[str, Array | None] = {"x": np.zeros((2, 64), np.float32), "w0": np.zeros((4, 36), np.uint8)}
    with pytest.raises(Exception, match=f"QMatMul 'under_test': .*{message}"):
        run_op("QMatMul", inputs, GOOD | changes, outputs={"y": (2, 4)}, tier="scalar")


@pytest.mark.parametrize("bad", [-1, 50])
def test_ids_outside_the_table_are_errors(bad: int) -> None:
    weight = reference.random_weight("q8_0", 50, 32, np.random.default_rng(10))
    ids = np.array([1, bad], np.int32)
    with pytest.raises(Exception, match=rf"EmbedTokens .*input_ids\[1\]: expected an id from 0 to 49, got {bad}"):
        run_op(
            "EmbedTokens",
            {"input_ids": ids, "weight": weight},
            {"format": "q8_0", "dim": 32, "scale": 1.0},
            outputs={"hidden": (2, 32)},
            tier="scalar",
        )
