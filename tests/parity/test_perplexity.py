"""Perplexity of the real models within 1% of transformers in float32 on the same (dequantized) weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import perplexity_windows as ppl
import pytest


def perplexity(llm: Any, windows: list[list[int]]) -> float:
    from trivet import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    nll, count = 0.0, 0
    for output in llm.generate([{"prompt_token_ids": window} for window in windows], params):
        positions = output.prompt_logprobs
        assert positions[0] is None
        for token, position in zip(output.prompt_token_ids[1:], positions[1:], strict=True):
            nll -= position[token].logprob
            count += 1
    return math.exp(nll / count)


def check(path: Path, name: str) -> None:
    from trivet import LLM

    expected = json.loads((ppl.DATA / f"{name}.json").read_text())
    with LLM(str(path), max_model_len=1024) as llm:
        token_ids = llm.get_tokenizer().encode(ppl.text(), add_special_tokens=False)
        assert token_ids == expected["token_ids"]
        got = perplexity(llm, ppl.windows(token_ids, expected["bos_token_id"]))
    print(f"{name}: perplexity {got:.4f}, reference {expected['perplexity']:.4f}")
    assert got == pytest.approx(expected["perplexity"], rel=0.01)


@pytest.mark.slow
def test_smollm2(smollm2_path: Path) -> None:
    check(smollm2_path, "smollm2-135m")


@pytest.mark.slow
@pytest.mark.real_models
@pytest.mark.parametrize("name", [name for name in ppl.MODELS if name != "smollm2-135m"])
def test_real_models(real_model: Callable[[str], Path], name: str) -> None:
    check(real_model(name), name)
