"""generation_config.json, of a checkpoint or of a folder that a flag names: honoured, or said to be without effect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUN = ("run", "Hello there", "--max-tokens", 12, "--ignore-eos")
FLAG, OWN = "flag", "checkpoint"
QUIET = {"transformers_version": "4.50", "_from_model_config": True, "bos_token_id": 1, "pad_token_id": 0,
         "num_beams": 1, "typical_p": 1.0, "max_length": 4096, "no_repeat_ngram_size": 0,
         "penalty_alpha": None, "use_cache": True, "do_sample": True}  # fmt: skip


@pytest.fixture(params=[FLAG, OWN])
def with_config(request: pytest.FixtureRequest, llama: Path, tmp_path: Path) -> Callable[[dict[str, Any]], list[Any]]:
    """with_config(its content) -> the flags of a model with that generation_config.json."""

    def write(content: dict[str, Any]) -> list[Any]:
        if request.param == OWN:
            folder = shutil.copytree(llama, tmp_path / "model", dirs_exist_ok=True)
            flags = ["-m", folder]
        else:
            folder = tmp_path
            flags = ["-m", llama, "--generation-config", folder]
        (folder / "generation_config.json").write_text(json.dumps(content))
        return flags

    return write


def test_do_sample_false_is_greedy(cli: Any, llama: Path, with_config: Callable[[dict[str, Any]], list[Any]]) -> None:
    greedy = cli(*RUN, "-m", llama, "--temperature", 0)
    hot = {"temperature": 1.9, "top_p": 0.99}
    off = with_config({"do_sample": False, **hot})
    assert {cli(*RUN, *off, "--seed", seed).out for seed in (1, 2)} == {greedy.out}
    assert cli(*RUN, *off, "--temperature", 1.9, "--seed", 1).out != greedy.out
    assert cli(*RUN, *with_config({"do_sample": True, **hot}), "--seed", 1).out != greedy.out
    refused = cli(*RUN, *with_config({"do_sample": "no"}))
    assert refused.status != 0 and "do_sample is 'no', expected true or false" in refused.err


def test_keys_that_change_answers_are_named_once(cli: Any, with_config: Callable[[dict[str, Any]], list[Any]]) -> None:
    flags = with_config(QUIET | {"num_beams": 4, "no_repeat_ngram_size": 3, "temperature": 0.5})
    lines = [line for line in cli(*RUN, *flags).err.splitlines() if "without effect" in line]
    assert len(lines) == 1 and "sets no_repeat_ngram_size, num_beams: " in lines[0]
    assert "without effect" not in cli(*RUN, *with_config(QUIET)).err


def test_a_folder_that_would_move_the_end_of_answers_is_named(cli: Any, llama: Path, tmp_path: Path) -> None:
    own = json.loads((llama / "config.json").read_text())["eos_token_id"]
    file = tmp_path / "generation_config.json"
    for eos, named in ((own, False), ([own], False), (None, False), ([own, 5], True), (5, True)):
        file.write_text(json.dumps({"eos_token_id": eos}))
        assert ("sets eos_token_id: " in cli(*RUN, "-m", llama, "--generation-config", tmp_path).err) == named, eos


@pytest.mark.parametrize("eos", ["x", [1, "x"], True, -1, 1.0, {}])
def test_a_folder_whose_end_of_answers_is_no_token_is_refused(cli: Any, llama: Path, tmp_path: Path, eos: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    result = cli(*RUN, "-m", llama, "--generation-config", tmp_path)
    assert result.status == 2 and result.err.count("\n") == 1
    assert f"eos_token_id is {eos!r}, expected a token id or a list of them" in result.err


def test_a_folder_replaces_the_defaults_of_the_model_and_says_which_are_gone(
    cli: Any, llama: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0, "top_p": 0.5, "top_k": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 4}))
    flags = ("-m", model, "--generation-config", tmp_path)
    result = cli(*RUN, *flags, "--seed", 1)
    (said,) = [line for line in result.err.splitlines() if "do not count" in line]
    assert said.startswith(f"generation_config={str(tmp_path)!r} is in place of the model's own")
    assert said.endswith(", whose temperature 0, top_p 0.5 do not count")
    assert result.out == cli(*RUN, "-m", llama, "--top-k", 4, "--seed", 1).out
    given = cli(*RUN, *flags, "--override-generation-config", json.dumps({"temperature": 0, "top_p": 0.5}))
    assert "do not count" not in given.err


def test_show_lists_them(cli: Any, llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4, "do_sample": False}))
    facts = cli("show", folder, "--json").json()
    assert (facts["generation"], facts["generation_keys_without_effect"]) == ({"temperature": 0}, ["num_beams"])
    assert "not honoured   num_beams" in cli("show", folder).out
