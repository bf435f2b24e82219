"""Graph inputs as the runner builds them, seen by a session that records them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trivet.exporters.architectures
import trivet.runtime.runner
from numpy.typing import NDArray
from trivet import LLM, SamplingParams
from trivet.backends.contract.opset import SAMPLING_FLOATS, SAMPLING_INTS
from trivet.runtime.request import Request
from trivet.runtime.runner.sampling_state import SamplingState


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, toy: Any) -> list[dict[str, NDArray[Any]]]:
    """Copies of the inputs of every Run."""
    runs: list[dict[str, NDArray[Any]]] = []
    original = toy.Session.run

    def run(session: Any, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        runs.append({name: array.copy() for name, array in inputs.items()})
        result: dict[str, NDArray[Any]] = original(session, inputs, outputs)
        return result

    monkeypatch.setattr(toy.Session, "run", run)
    return runs


def column(run: Mapping[str, NDArray[Any]], name: str) -> list[Any]:
    if name in SAMPLING_INTS:
        return list(run["sampling_ints"][:, SAMPLING_INTS.index(name)].tolist())
    return list(run["sampling_floats"][:, SAMPLING_FLOATS.index(name)].tolist())


def test_a_burst_is_admitted_in_one_step(package: str, recorded: list[dict[str, NDArray[Any]]]) -> None:
    prompts = [[40 + i, *[50] * 49] for i in range(5)]
    with LLM(package) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert [len(run["seq_lens"]) for run in recorded] == [5, 5, 5, 5]


def test_draws_are_numbered_from_zero_and_go_on_after_a_preemption(
    package: str, recorded: list[dict[str, NDArray[Any]]]
) -> None:
    params = [SamplingParams(temperature=1, seed=100 + i, max_tokens=20, ignore_eos=True) for i in range(8)]
    with LLM(package, num_gpu_blocks_override=20, block_size=4, max_model_len=64) as llm:
        llm.generate([[40 + i] * 10 for i in range(8)], params)
        assert llm.get_stats()["num_preemptions"] > 0
    drawn: dict[int, list[int]] = {}
    for run in recorded:
        for seed, offset in zip(column(run, "seed"), column(run, "offset"), strict=True):
            drawn.setdefault(seed, []).append(offset)
    assert drawn == {100 + i: list(range(20)) for i in range(8)}


def test_rows_carry_the_parameters_and_nothing_else(package: str, recorded: list[dict[str, NDArray[Any]]]) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        SamplingParams(
            temperature=0.5,
            top_p=0.75,
            top_k=9,
            min_p=0.25,
            seed=-5,
            max_tokens=2,
            ignore_eos=True,
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={50: 2.0, 51: -3.0},
            allowed_token_ids=[50, 51, 52],
            min_tokens=1,
            stop_token_ids=[7],
            logprobs=2,
        ),
    ]
    with LLM(package) as llm:
        outputs = llm.generate([[40, 41, 42], [60, 61, 62, 63]], params)
    first, second = recorded
    assert first["input_ids"].tolist() == [40, 41, 42, 60, 61, 62, 63]
    assert first["positions"].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert first["query_start_loc"].tolist() == [0, 3, 7]
    assert first["logits_indices"].tolist() == [2, 6]
    assert [column(first, name) for name in ("temperature", "top_p")] == [[0, 0.5], [1, 0.75]]
    assert column(first, "min_p") == [0, 0.25]
    assert column(first, "top_k") == [0, 9]
    assert column(first, "seed")[1] == -5
    assert column(first, "num_logprobs") == [-1, 2]
    assert first["max_num_logprobs"] == 2
    assert column(first, "forced_token_id") == [-1, -1]
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    assert [column(first, name) for name in penalties] == [[1, 1.5], [0, 0.5], [0, -0.5]]
    assert first["bias_token_ids"].tolist() == [50, 51]
    assert first["bias_values"].tolist() == [2, -3]
    assert first["bias_loc"].tolist() == [0, 0, 2]
    assert first["allowed_token_ids_loc"].tolist() == [0, 0, 3]
    assert first["banned_token_ids"].tolist() == [7, 300]
    assert first["banned_token_ids_loc"].tolist() == [0, 0, 2]
    assert first["token_history"].tolist() == [60, 61, 62, 63]
    token = outputs[1].outputs[0].token_ids[0]
    assert second["input_ids"].tolist() == [outputs[0].outputs[0].token_ids[0], token]
    assert second["seq_lens"].tolist() == [4, 5]
    assert second["token_history"].tolist() == [60, 61, 62, 63, token]
    assert column(second, "num_prompt_tokens") == [0, 4]  # of the row's history
    assert second["banned_token_ids"].tolist() == []


def test_prompt_logprobs_rows_are_forced_to_the_next_prompt_token(
    package: str, recorded: list[dict[str, NDArray[Any]]]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3, repetition_penalty=1.1)
    with LLM(package, max_num_batched_tokens=4, max_num_seqs=1) as llm:
        llm.generate([[40, 41, 42, 43, 44, 45]], params)
    assert [column(run, "forced_token_id") for run in recorded] == [[41, 42, 43, 44], [45, -1]]
    assert [run["logits_indices"].tolist() for run in recorded] == [[0, 1, 2, 3], [0, 1]]
    assert [column(run, "num_logprobs") for run in recorded] == [[3, 3, 3, 3], [3, -1]]
    assert [column(run, "num_prompt_tokens") for run in recorded] == [[0, 0, 0, 0], [0, 6]]
    assert [run["token_history_loc"].tolist() for run in recorded] == [[0, 0, 0, 0, 0], [0, 0, 6]]


def test_more_rows_than_sequences_grow_the_buffers(package: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    prompt = [40 + i % 80 for i in range(300)]
    with LLM(package, max_num_seqs=2) as llm, LLM(package, max_num_seqs=256) as roomy:
        small, large = llm.generate([prompt, prompt], params), roomy.generate([prompt, prompt], params)
    assert [o.prompt_logprobs for o in small] == [o.prompt_logprobs for o in large]
    assert small[0].prompt_logprobs is not None
    assert len(small[0].prompt_logprobs) == 300


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], [9]), ([5], [6, 9]), ([5, 6], [7, 9]), ([6], [9]), ([5, 5], [6, 9]), ([4, 5, 6], [7, 9]), ([5, 6, 7], [9])],
)
def test_only_the_last_token_of_a_bad_word_is_banned_after_the_others(output: list[int], banned: list[int]) -> None:
    params = SamplingParams().clone(seed=1, bad_words_token_ids=[[5, 6, 7], [5, 6], [9]])
    request = Request("r", [5, 6], params)  # the prompt ends like the word, which does not count
    state = SamplingState(request, 100)
    for token in output:
        request.append_output_token_ids(token)
    lists = {name: np.sort(values).tolist() for name, values in state.row_lists(request)}
    assert lists == {"banned_token_ids": banned}


def test_the_runner_knows_no_architecture() -> None:
    families = {p.stem for p in Path(next(iter(trivet.exporters.architectures.__path__))).glob("*.py")}
    families |= {"llama", "qwen", "qwen2", "qwen3", "gemma", "gemma3", "mistral", "smollm", "phi"}
    families -= {"__init__", "decoder", "model", "rope", "tensor_table"}
    runner = Path(next(iter(trivet.runtime.runner.__path__)))
    files = sorted(runner.glob("*.py"))
    assert len(files) >= 3
    for file in files:
        source = file.read_text().lower()
        assert [name for name in families if name in source] == [], file.name
        used = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
        assert used.isdisjoint({"family", "architecture", "num_hidden_layers"}), file.name
