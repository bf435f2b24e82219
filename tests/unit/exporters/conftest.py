"""A checkpoint of one test alone, and an empty package cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def checkpoint(tiny: Callable[[str, str], Path], tmp_path: Path) -> Path:
    """A GGUF file of this test alone."""
    source = tiny("llama", "gguf-q8_0")
    return Path(shutil.copy(source, tmp_path / "my model.gguf"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
