"""RotaryTable against NumPy: the angle is rounded to float32, then cos and sin are right to one rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .reference_attention import rotary_table
from .single_op import available_tiers, run_op

Array = NDArray[Any]
TIERS = available_tiers()
BOUND = 1.2e-7  # absolute, per unit of scale


def run_rotary(positions: Array, inv_freq: Array, scale: float, tier: str) -> Array:
    return run_op(
        "RotaryTable",
        {"positions": positions.astype(np.int32), "inv_freq": inv_freq.astype(np.float32)},
        {"scale": scale},
        outputs={"cos_sin": (len(positions), 2 * len(inv_freq))},
        tier=tier,
    )["cos_sin"]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 700])
@pytest.mark.parametrize("half", [0, 1, 16, 40])
def test_table(tier: str, tokens: int, half: int) -> None:
    positions = np.random.default_rng(tokens).integers(0, 131072, tokens)
    inv_freq = 1e4 ** -(np.arange(half) / max(half, 1))
    for scale in (1.0, 1.5):
        got = run_rotary(positions, inv_freq, scale, tier)
        expected = rotary_table(positions, inv_freq, scale)
        np.testing.assert_allclose(got, expected, rtol=0, atol=BOUND * scale)


def test_rows_do_not_depend_on_each_other() -> None:
    positions, inv_freq = np.arange(1000), 1e6 ** -(np.arange(32) / 32)
    whole = run_rotary(positions, inv_freq, 1.0, TIERS[-1])
    for t in (0, 1, 999):
        assert run_rotary(positions[t : t + 1], inv_freq, 1.0, TIERS[-1]).tobytes() == whole[t].tobytes()


def test_bad_inputs_are_named() -> None:
    with pytest.raises(Exception, match=r"positions\[1\]: expected 0 or more, got -3"):
        run_rotary(np.array([1, -3]), np.ones(4), 1.0, TIERS[-1])
    with pytest.raises(Exception, match=r"attribute 'scale': expected a finite number"):
        run_rotary(np.array([1]), np.ones(4), float("inf"), TIERS[-1])
