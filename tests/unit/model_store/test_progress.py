"""Progress of a download, from what lies in its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from trivet.runtime.model_store.progress import folder_size


def test_a_folder_that_vanishes_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/kept", "b/lost"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"123")
    assert folder_size(tmp_path) == 6
    scandir = os.scandir

    def clean_up_first(folder: Any) -> Any:
        if Path(folder) != tmp_path and (tmp_path / "b").exists():
            (tmp_path / "b/lost").unlink()
            (tmp_path / "b").rmdir()
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", clean_up_first)
    assert folder_size(tmp_path) == 3
