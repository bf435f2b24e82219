"""The environment of a bundle: how options reach the build of a package that is compiled for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from release import environment


def test_options_stand_on_the_line_of_the_requirement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip gives options of its command line to no requirement of a file; numpy then had a CPU baseline of its own."""
    lines: list[str] = []

    def fake_run(command: list[Any], **_: Any) -> str:
        words = [str(word) for word in command]
        if "wheel" in words:
            assert not any(word.startswith("--config-settings") for word in words)
            folder = Path(words[words.index("-w") + 1])
            lines.append((folder / "pin.txt").read_text(encoding="ascii"))
            (folder / "numpy-0-py3-none-any.whl").touch()
        return "a tool\n"

    monkeypatch.setenv("TRIVET_RELEASE_CACHE", str(tmp_path))
    monkeypatch.setattr(environment, "run", fake_run)
    option = '--config-settings="setup-args=-Dcpu-baseline=none"'
    wheel = environment._compiled(["python"], "numpy", [option], {})
    assert wheel.name == "numpy-0-py3-none-any.whl"
    (line,) = lines
    assert line.startswith("numpy==") and line.endswith(f" {option}\n") and "--hash=sha256:" in line
