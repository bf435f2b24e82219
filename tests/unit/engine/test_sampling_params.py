"""SamplingParams: ranges, normalisation and messages."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from trivet import SamplingParams
from trivet.runtime.errors import InvalidRequestError, TrivetError
from trivet.runtime.sampling_params import RequestOutputKind


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"stop": 5}, "stop must be a list, got 5 of type int"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"bad_words": "ab"}, "bad_words must be a list, got 'ab' of type str"),
        ({"allowed_token_ids": {1: 2}}, r"allowed_token_ids must be a list, got \{1: 2\} of type dict"),
        ({"n": 1.5}, "n must be an integer"),
        ({"n": True}, "n must be an integer"),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling"),
        ({"temperature": -0.1}, "temperature must be non-negative, got -0.1"),
        ({"temperature": 2.1}, r"temperature must be in \[0, 2\], got 2.1"),
        ({"temperature": math.nan}, "temperature must be a finite number, got nan"),
        ({"temperature": math.inf}, "temperature must be a finite number, got inf"),
        ({"temperature": 10**400}, "temperature must be a finite number, got an integer of 1329 bits"),
        ({"logit_bias": {1: 10**400}}, "logit_bias of token 1 must be a finite number, got an integer of 1329 bits"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, "top_p must be in"),
        ({"top_p": 1e-300}, "top_p must be at least 1e-30, got 1e-300"),
        ({"top_p": math.nan}, "top_p must be a finite number"),
        ({"top_k": -2}, "top_k must be 0"),
        ({"top_k": 1.0}, "top_k must be an integer"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]"),
        ({"min_p": 1.1}, "min_p must be in"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be greater than zero"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be greater than zero"),
        ({"repetition_penalty": 1e-300}, r"repetition_penalty must be in \[1e-20, 1e\+20\], got 1e-300"),
        ({"repetition_penalty": 1e300}, r"repetition_penalty must be in \[1e-20, 1e\+20\], got 1e\+300"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0"),
        ({"min_tokens": 17}, "min_tokens must be less than or equal to max_tokens=16, got 17"),
        ({"logprobs": -2}, "logprobs must be non-negative or -1"),
        ({"prompt_logprobs": -2}, "prompt_logprobs must be non-negative or -1"),
        ({"seed": 2**63}, "seed must be a signed 64-bit integer"),
        ({"stop": [""]}, "stop cannot contain an empty string"),
        ({"stop": "x", "detokenize": False}, "detokenize=True"),
        ({"stop": [1]}, "stop must contain only strings"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must contain only integers"),
        ({"bad_words": [""]}, "bad_words cannot contain an empty string"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids must contain only integers"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias keys must be token ids, got 'x'"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias keys must be token ids, got '999"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 must be a finite number"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"output_kind": "DELTA"}, "output_kind must be a RequestOutputKind"),
    ],
)
def test_refusals_name_field_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**options)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TrivetError)


def test_limits_themselves_are_accepted() -> None:
    limits: list[dict[str, Any]] = [
        {"temperature": 2.0, "top_p": 1.0, "min_p": 1.0, "top_k": 1},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 1e-6},
        {"max_tokens": None, "min_tokens": 99, "logprobs": 0, "prompt_logprobs": -1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1, "max_tokens": 1, "min_tokens": 1},
    ]
    for options in limits:
        assert SamplingParams(**options).warnings == []


def test_defaults_and_normal_forms() -> None:
    params = SamplingParams(top_k=-1, seed=-1, stop="x")
    assert (params.top_k, params.seed, params.stop, params.max_tokens) == (0, None, ["x"], 16)
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    assert (greedy.top_p, greedy.top_k, greedy.min_p, greedy.is_greedy) == (1.0, 0, 0.0, True)
    assert SamplingParams(logit_bias={"12": 1.5}).logit_bias == {12: 1.5}  # type: ignore[dict-item]


@pytest.mark.parametrize("temperature", [1e-7, 0.0099])
def test_tiny_temperatures_are_raised_with_a_warning(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    assert params.temperature == 0.01
    assert len(params.warnings) == 1
    assert f"temperature {temperature:g}" in params.warnings[0]


def test_logit_bias_is_clamped_with_a_warning() -> None:
    params = SamplingParams(logit_bias={1: 200.0, 2: -101.0, 3: 100.0})
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 100.0}
    assert "[1, 2] clamped" in params.warnings[0]


@pytest.mark.parametrize("name", ["warnings", "eos_token_ids", "bad_words_token_ids"])
def test_results_are_no_arguments(name: str) -> None:
    with pytest.raises(TypeError, match="are results, not arguments"):
        SamplingParams(**{name: [1]})  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))])
def test_copies_keep_results(copied: Callable[[SamplingParams], SamplingParams]) -> None:
    params = SamplingParams(temperature=0.001, stop=["a"]).clone(eos_token_ids=(2,))
    twin = copied(params)
    assert params.warnings and twin == params
    assert (twin.warnings, twin.eos_token_ids) == (params.warnings, (2,))
    assert twin.warnings is not params.warnings and twin.stop is not params.stop


def test_results_do_not_count_when_compared() -> None:
    assert SamplingParams(temperature=0.001) == SamplingParams(temperature=0.01).clone(eos_token_ids=(2,))
    assert SamplingParams(temperature=0.5) != SamplingParams(temperature=0.01)
    assert SamplingParams() != {"temperature": 1.0}


def test_clones_share_nothing_that_changes() -> None:
    params = SamplingParams(temperature=0.001)
    twin = params.clone(output_kind=RequestOutputKind.DELTA)
    twin.warnings.append("x")
    assert len(params.warnings) == 1
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    with pytest.raises(AttributeError):
        params.clone(unknown=1)
