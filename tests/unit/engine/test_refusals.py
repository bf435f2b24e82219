"""Requests that cannot be served: refused, or failed alone, while the others go on."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from numpy.typing import NDArray
from trivet import LLM, SamplingParams
from trivet.backends.contract.opset import NO_TOKEN
from trivet.backends.errors import DeviceMemoryError
from trivet.runtime.errors import InvalidRequestError

PROMPT = [70, 71, 72]


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [65], "bad_words": ["A"]},
        {"allowed_token_ids": [65], "stop_token_ids": [65], "min_tokens": 2},
        {"allowed_token_ids": [300, 65], "bad_words": ["A"], "min_tokens": 1},
        {"stop_token_ids": list(range(320)), "min_tokens": 1},
    ],
)
def test_parameters_that_leave_no_token_are_refused(package: str, fields: dict[str, Any]) -> None:
    with LLM(package) as llm, pytest.raises(InvalidRequestError, match="no token is left to generate"):
        llm.generate([PROMPT], SamplingParams(**fields))


def test_a_request_that_runs_out_of_tokens_fails_alone(package: str, toy: types.SimpleNamespace) -> None:
    """After "A" nothing but "A" is allowed, and "AA" is a bad word: the graph would refuse the step of all."""
    good = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    stuck = SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=[65], bad_words=["AA"])
    with LLM(package) as llm:
        first, failed, last = llm.generate([PROMPT, PROMPT, [80]], [good, stuck, good])
        assert failed.outputs[0].finish_reason == "error" and failed.outputs[0].token_ids == [65]
        assert failed.error is not None and "no token is left to generate" in failed.error
        assert first.outputs[0].token_ids == toy.greedy(PROMPT, 20) and last.outputs[0].token_ids == toy.greedy(
            [80], 20
        )
        assert llm.generate([PROMPT], good)[0].outputs[0].token_ids == toy.greedy(PROMPT, 20)
        assert llm.get_stats()["kv_cache_usage"] == 0


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_that_are_looked_for_after_every_token_are_bounded(package: str, name: str) -> None:
    few: dict[str, Any] = {name: [f"w{i}" for i in range(1024)]}
    with LLM(package) as llm:
        assert llm.generate([PROMPT], SamplingParams(max_tokens=2, **few))[0].error is None
        with pytest.raises(InvalidRequestError, match=f"{name} has 1025 strings, at most 1024 are accepted"):
            too_many: dict[str, Any] = {name: [*few[name], "x"]}
            llm.generate([PROMPT], SamplingParams(max_tokens=2, **too_many))


def test_repeated_stop_tokens_count_once() -> None:
    assert SamplingParams(stop_token_ids=[3, 4, 3] * 1000).stop_token_ids == [3, 4]


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 1}, {"n": 2, "temperature": 1.0, "seed": 3}])
def test_a_request_without_usable_logits_fails_alone(
    package: str, toy: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """The graph marks rows behind token 90 with NO_TOKEN; only their request ends, also in the middle of a prompt."""
    original = toy.Session.run

    def run(session: Any, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        results: dict[str, NDArray[Any]] = original(session, inputs, outputs)
        results["sampled_token_ids"][inputs["input_ids"][inputs["logits_indices"]] == 90] = NO_TOKEN
        return results

    monkeypatch.setattr(toy.Session, "run", run)
    good = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    bad = SamplingParams(**{"temperature": 0, "max_tokens": 8, **fields})
    prompt = [90, 71, 72] if "prompt_logprobs" in fields else [71, 72, 90]
    with LLM(package, max_num_batched_tokens=7, max_num_seqs=7) as llm:
        first, failed, last = llm.generate([PROMPT, prompt, [80]], [good, bad, good])
        assert failed.finished and {output.finish_reason for output in failed.outputs} == {"error"}
        assert failed.error is not None and "try kv_cache_dtype float32 or bfloat16" in failed.error
        assert first.outputs[0].token_ids == toy.greedy(PROMPT, 8)
        assert last.outputs[0].token_ids == toy.greedy([80], 8)
        assert llm.generate([PROMPT], good)[0].outputs[0].token_ids == toy.greedy(PROMPT, 8)
        assert llm.get_stats()["kv_cache_usage"] == 0


@pytest.mark.parametrize("failing_run", [0, 1, 3])
def test_a_step_without_memory_fails_its_requests_alone(
    package: str, toy: types.SimpleNamespace, failing_run: int
) -> None:
    """Requests of other steps go on, and no later one hits what the failed step did not write into the cache."""
    prompts = [list(range(40, 53)), list(range(60, 70)), list(range(40, 55)), list(range(80, 99))]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = [toy.greedy(prompt, 9) for prompt in prompts]

    def fail(session: Any) -> None:
        if session.num_runs == failing_run:
            session.num_runs += 1
            raise DeviceMemoryError("step failed: CUDA: cannot allocate 512 bytes on device 0")

    with LLM(package, block_size=4, max_num_batched_tokens=16, max_num_seqs=2, max_model_len=64) as llm:
        toy.Session.before_run = fail
        outputs = llm.generate(prompts, params)
        failed = [output for output in outputs if output.error is not None]
        assert 1 <= len(failed) <= 2
        for output, tokens in zip(outputs, expected, strict=True):
            if output.error is None:
                assert output.outputs[0].token_ids == tokens
                continue
            assert output.outputs[0].finish_reason == "error"
            assert "ran out of memory" in output.error and "cannot allocate 512 bytes" in output.error
            assert output.outputs[0].token_ids == tokens[: len(output.outputs[0].token_ids)]
        again = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in again] == expected
        assert llm.get_stats()["kv_cache_usage"] == 0
