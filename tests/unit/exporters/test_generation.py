"""Sampling keys of GGUF files: which of them would change answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from trivet.exporters.checkpoint.tensors import Checkpoint
from trivet.exporters.generation import read_generation_defaults


@pytest.mark.parametrize(("penalty", "named"), [(None, False), (1.0, False), (1.1, True)])
def test_the_window_of_a_penalty_matters_with_a_penalty(penalty: float | None, named: bool) -> None:
    metadata: dict[str, Any] = {"general.sampling.penalty_last_n": 64, "general.sampling.penalty_repeat": penalty}
    checkpoint = SimpleNamespace(kind="gguf", metadata=metadata, path=Path("m.gguf"))
    defaults, without_effect = read_generation_defaults(cast(Checkpoint, checkpoint))
    assert defaults.repetition_penalty == penalty
    assert without_effect == ["general.sampling.penalty_last_n"] * named
