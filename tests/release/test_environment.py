"""The environment of a bundle: how options reach the build of a package that is compiled for it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from release import environment
from release.errors import BuildError
from release.system import system_for


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


def test_a_stub_driver_in_the_build_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is compiled; a library of our own with a similar name is none."""

    def copied(target: Path) -> None:
        for name in ("stubs/libcuda.so.1", "libtrivet_cuda.so"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).touch()

    monkeypatch.setattr(environment, "copy_source", copied)
    monkeypatch.setattr(environment, "run", lambda *_, **__: pytest.fail("something was built"))
    with pytest.raises(BuildError, match=r"in the tree that is built: stubs/libcuda\.so\.1$"):
        environment._trivet_wheel(tmp_path, ["python"], {}, system_for(platform.machine()))


@pytest.mark.parametrize(
    ("commands", "complaint"),
    [
        ('[{"command": "c++ -O3 -march=native -c x.cc"}]', "was compiled with -march=native"),
        (None, r"left no compile_commands\.json"),
    ],
)
def test_code_for_this_machines_cpu(
    commands: str | None, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the wheel was built; what nobody can read counts as bad."""

    def built(command: list[Any], **_: Any) -> str:
        if commands is not None:
            (tmp_path / "source/build/wheel").mkdir(parents=True)
            (tmp_path / "source/build/wheel/compile_commands.json").write_text(commands)
        return ""

    monkeypatch.setattr(environment, "copy_source", lambda target: target.mkdir(parents=True))
    monkeypatch.setattr(environment, "run", built)
    with pytest.raises(BuildError, match=complaint):
        environment._trivet_wheel(tmp_path, ["python"], {}, system_for(platform.machine()))
