"""The generator still draws the weights that the references were recorded with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import MODELS, effective_weights, weights_digest

REFERENCES = sorted(path.stem for path in (Path(__file__).parent.parent / "data" / "references").glob("*.json"))


def test_every_model_has_a_reference() -> None:
    assert set(MODELS) <= set(REFERENCES)


@pytest.mark.parametrize("name", REFERENCES)
def test_weights_are_the_recorded_ones(reference: Callable[[str], dict[str, Any]], name: str) -> None:
    recorded = reference(name)
    weights = effective_weights(MODELS[recorded["model"]], recorded["weight_type"])
    assert weights_digest(weights) == recorded["weights_sha256"]


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_worth_comparing_with(reference: Callable[[str], dict[str, Any]], name: str) -> None:
    """No near ties that rounding could turn, and no continuation that repeats one token."""
    for case in reference(name)["cases"]:
        assert case["min_margin"] >= 2e-3
        assert len(set(case["token_ids"])) >= 5
