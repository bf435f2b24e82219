"""Weight formats against the gguf package, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from trivet.backends import library
from trivet.backends.contract.formats import FORMATS
from trivet.exporters.dequantize import DEQUANTIZERS, dequantize_rows

from ...kernels.reference import HALF_OFFSETS

EDGE_HALVES = np.array([0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0, 1.0, -3.5e-4], np.float16)
ALL = sorted(FORMATS)


def ggml_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(FORMATS[name].ggml_type)


def random_rows(name: str, seed: int) -> NDArray[np.uint8]:
    """Random bytes, with float16 fields that are finite and hold zeros, subnormals and the largest values."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (24, FORMATS[name].row_bytes(1024)), dtype=np.uint8)
    if name in HALF_OFFSETS:
        blocks = rows.reshape(-1, FORMATS[name].block_bytes)
        for offset in HALF_OFFSETS[name]:
            halves = random.standard_normal(len(blocks)).astype(np.float16)
            halves[: len(EDGE_HALVES)] = EDGE_HALVES
            blocks[:, offset : offset + 2] = halves[:, None].view(np.uint8)
    return rows


def test_every_format_of_the_contract_has_a_dequantizer() -> None:
    assert set(DEQUANTIZERS) == set(FORMATS)


@pytest.mark.parametrize("dequantize", [dequantize_rows, library.dequantize_rows], ids=["numpy", "library"])
@pytest.mark.parametrize("name", ALL)
def test_dequantize_is_bit_exact(name: str, dequantize: Callable[..., NDArray[np.float32]]) -> None:
    rows = random_rows(name, 1)
    ours = dequantize(name, rows, np.full((24, 1024), np.nan, np.float32))
    theirs = rows.view(np.float32) if name == "f32" else gguf.dequantize(rows, ggml_type(name))
    nan = np.isnan(theirs)  # of random f16 and bf16 bits; only that they are NaN is compared
    assert ours.shape == theirs.shape
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@pytest.mark.parametrize("name", [n for n in ALL if FORMATS[n].block_size > 1])
def test_a_row_must_hold_whole_blocks(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: a row of 100 elements is not a multiple"):
        FORMATS[name].row_bytes(100)


def test_the_library_refuses_what_it_cannot_dequantize() -> None:
    rows, out = random_rows("q4_0", 2), np.zeros((24, 1024), np.float32)
    with pytest.raises(ValueError, match="got 'q3_k'"):
        library.dequantize_rows("q3_k", rows, out)
    with pytest.raises(ValueError, match=f"got {rows.nbytes} bytes for {out.size // 2} float32"):
        library.dequantize_rows("q4_0", rows, out[:12])
    with pytest.raises(ValueError, match="float64"):
        library.dequantize_rows("q4_0", rows, out.astype(np.float64))
    with pytest.raises(ValueError, match="expected C-contiguous arrays"):
        library.dequantize_rows("q4_0", rows[:, ::2], out)


def test_dequantize_writes_into_the_given_array() -> None:
    rows = random_rows("q4_k", 4)
    out = np.full((24, 1024), np.nan, np.float32)
    assert dequantize_rows("q4_k", rows, out) is out
    assert np.array_equal(out, gguf.dequantize(rows, ggml_type("q4_k")))
