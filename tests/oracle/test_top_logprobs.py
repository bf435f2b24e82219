"""Top-20 log-probabilities of the real models near llama.cpp's, from the same GGUF files.

Both engines quantize activations, in different blocks, so the values differ a little; a wrong scale, template of a
block or position differs a lot.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.oracle, pytest.mark.real_models, pytest.mark.slow]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, two people walked on the Moon for the first time. Their names were",
    "Water boils at a temperature of",
    "Once upon a time there was a king who had three daughters, and the youngest of them",
)
MEAN_LIMIT, MAX_LIMIT = 0.15, 1.0  # nats, over llama.cpp's top 20


def llama_cpp_logprobs(path: Path, prompts: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(path), n_ctx=512, n_threads=2, verbose=False, logits_all=True)
    rows = []
    for prompt in prompts:
        model.reset()
        model.eval(prompt)
        logits = np.array(model.scores[len(prompt) - 1], np.float64)
        rows.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
    return rows


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b"])
def test_near_llama_cpp(real_model: Callable[[str], Path], name: str) -> None:
    from trivet import LLM, SamplingParams

    path = real_model(name)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, ignore_eos=True)
    with LLM(str(path), max_model_len=512) as llm:
        prompts = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    differences = []
    for output, expected in zip(outputs, llama_cpp_logprobs(path, prompts), strict=True):
        assert output.outputs[0].logprobs is not None
        (position,) = output.outputs[0].logprobs
        ours = {token: entry.logprob for token, entry in position.items()}
        best = [int(i) for i in np.argsort(-expected)[:20]]
        assert len(set(best) & set(ours)) >= 15
        differences += [abs(ours[token] - float(expected[token])) for token in best if token in ours]
    print(f"{name}: mean {np.mean(differences):.4f}, max {np.max(differences):.4f}")
    assert np.mean(differences) < MEAN_LIMIT
    assert np.max(differences) < MAX_LIMIT
