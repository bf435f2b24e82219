"""reference.py and the family readers against what transformers recorded for the tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trivet.exporters.architectures import build_model
from trivet.exporters.checkpoint import open_checkpoint
from trivet.exporters.reference import evaluate

FLOAT_MODELS = ["llama", "llama_tied", "llama3", "mistral", "qwen2", "qwen3", "gemma3", "llama_wide"]
CASES = [
    *((name, name, kind) for name in FLOAT_MODELS for kind in ("safetensors", "gguf-f32")),
    ("llama", "llama", "safetensors-sharded"),
    *(("llama.bf16", "llama", kind) for kind in ("safetensors-bf16", "gguf-bf16")),
    *(("llama.f16", "llama", kind) for kind in ("safetensors-f16", "gguf-f16")),
    *((f"llama.{t}", "llama", f"gguf-{t}") for t in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")),
    *((f"llama_wide.{t}", "llama_wide", f"gguf-{t}") for t in ("q4_k", "q5_k", "q6_k")),
]


@pytest.mark.parametrize(("recorded", "model_name", "kind"), CASES, ids=[f"{c[1]}-{c[2]}" for c in CASES])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    recorded: str,
    model_name: str,
    kind: str,
    tiny: Callable[[str, str], Path],
    reference: Callable[[str], dict[str, Any]],
) -> None:
    with open_checkpoint(tiny(model_name, kind)) as checkpoint:
        model = build_model(checkpoint)
        for case in reference(recorded)["cases"]:
            prompt, tokens = case["prompt_token_ids"], case["token_ids"]
            logits = evaluate(model, np.array(prompt + tokens[:-1], np.int32)).logits[len(prompt) - 1 :]
            assert logits.argmax(axis=1).tolist() == tokens
            first = logits[0].astype(np.float64)
            logprobs = first - first.max() - np.log(np.exp(first - first.max()).sum())
            ids, expected = zip(*case["first_logprobs"], strict=True)
            np.testing.assert_allclose(logprobs[list(ids)], expected, atol=5e-4)
