"""A model of the catalogue under its name; a tiny one stands in its place in the store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trivet.runtime.model_store import catalogue
from trivet.runtime.model_store.store import Record, StoredFile, install

RUN = ("run", "Hello there", "--max-tokens", 12, "--ignore-eos", "--seed", 7)
DEFAULTS = {"temperature": 0.2, "top_p": 0.9}  # of the entry


@pytest.fixture
def stored(trivet_home: Path, tiny: Callable[[str, str], Path]) -> Path:
    """The weights of `smollm2`, in the store."""
    reference = catalogue().models["smollm2"].reference
    staged = trivet_home / "models" / "staged"
    staged.mkdir(parents=True)
    weights = Path(shutil.copy(tiny("llama", "gguf-q8_0"), staged / "m.gguf"))
    files = [StoredFile(name="m.gguf", size_bytes=weights.stat().st_size, sha256=None)]
    record = Record(
        name="smollm2", reference=reference, revision="1", entry="m.gguf", files=files, license=None,
        pulled_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    return install(staged, record).path


def test_its_sampling_defaults_are_those_of_the_catalogue(cli: Any, stored: Path, trivet_home: Path) -> None:
    home = {"TRIVET_HOME": str(trivet_home)}
    reference = catalogue().models["smollm2"].reference
    by_name = [
        cli(*RUN, *flags, **home) for flags in ([], ["-m", "smollm2"], ["-m", reference])
    ]  # [] = the default model
    by_file = cli(*RUN, "-m", stored, **home)
    asked = cli(*RUN, "-m", stored, "--temperature", 0.2, "--top-p", 0.9, **home)
    assert {run.out for run in by_name} == {asked.out} != {by_file.out}, by_name[0].err
    for hot in (
        ["--temperature", 1, "--top-p", 1],
        ["--override-generation-config", json.dumps({"temperature": 1, "top_p": 1})],
        ["--generation-config", "vllm"],
    ):
        assert cli(*RUN, *hot, **home).out == by_file.out, hot


def test_a_folder_of_defaults_says_that_it_replaces_them(
    cli: Any, stored: Path, trivet_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1}))
    result = cli(*RUN, "--generation-config", tmp_path, TRIVET_HOME=str(trivet_home))
    assert "is in place of the model's own, whose top_p 0.9 does not count" in result.err
    assert result.out == cli(*RUN, "-m", stored, TRIVET_HOME=str(trivet_home)).out


def test_show_and_the_python_api_say_them(cli: Any, stored: Path, trivet_home: Path) -> None:
    from trivet import LLM

    home = {"TRIVET_HOME": str(trivet_home)}
    assert cli("show", "smollm2", "--json", **home).json()["generation"] == DEFAULTS
    assert cli("show", stored, "--json", **home).json()["generation"] == {}
    assert "sampling       temperature 0.2, top_p 0.9" in cli("show", "smollm2", **home).out.splitlines()
    assert "sampling " not in cli("show", stored, **home).out
    with LLM("smollm2") as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_p) == (0.2, 0.9)


def test_a_name_goes_before_a_path_and_says_so(
    cli: Any, stored: Path, llama: Path, trivet_home: Path, tmp_path: Path
) -> None:
    home = {"TRIVET_HOME": str(trivet_home)}
    here = tmp_path / "here"
    here.mkdir()
    by_name = cli(*RUN, "-m", "smollm2", **home)
    assert by_name.err.count("\n") == by_name.err.count("preparing the model, once\n"), by_name.err
    shutil.copytree(llama, here / "smollm2")
    shadowed = cli(*RUN, "-m", "smollm2", cwd=here, **home)
    assert shadowed.out == by_name.out
    assert shadowed.err == (
        f"'smollm2' is taken as the name of {catalogue().models['smollm2'].reference}, "
        "not as the folder here: write ./smollm2 for that\n"
    )
    by_path = cli(*RUN, "-m", "./smollm2", cwd=here, **home)
    assert by_path.out != by_name.out and "taken as" not in by_path.err
    shutil.rmtree(here / "smollm2")
    (here / "smollm2").mkdir()  # of something else
    assert cli(*RUN, "-m", "smollm2", cwd=here, **home).err == ""
    part = here / "smollm2" / "m-00001-of-00002.gguf"
    part.touch()
    beside_a_part = cli(*RUN, "-m", "smollm2", cwd=here, **home)
    assert (beside_a_part.out, beside_a_part.err) == (by_name.out, "")
    part.unlink()
    (here / "smollm2").rmdir()
    shutil.copy(stored, here / "smollm2")
    assert "not as the file here" in cli("show", "smollm2", cwd=here, **home).err
