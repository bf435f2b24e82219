"""Greedy tokens equal transformers', for every family and both file kinds, however the engine schedules the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tiny = Callable[[str, str], Path]
Reference = Callable[[str], dict[str, Any]]

MODELS = ("llama", "llama_tied", "llama3", "mistral", "qwen2", "qwen3", "gemma3")
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks_of_7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "chunks_of_7_small_blocks": {"max_num_batched_tokens": 7, "max_num_seqs": 3, "block_size": 4},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "four_threads": {"num_threads": 4},
}


def generate(llm: Any, prompts: list[list[int]], num_tokens: int) -> list[Any]:
    from trivet import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    outputs: list[Any] = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return outputs


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def open_llm(path: Path, **options: Any) -> Any:
    from trivet import LLM

    return LLM(str(path), **({"kv_cache_memory_bytes": 64 << 20, "num_threads": 2} | options))


@pytest.mark.parametrize("checkpoint_format", ["safetensors", "gguf-f32"])
@pytest.mark.parametrize("model", MODELS)
def test_alone(tiny: Tiny, reference: Reference, model: str, checkpoint_format: str) -> None:
    cases = reference(model)["cases"]
    with open_llm(tiny(model, checkpoint_format)) as llm:
        for case in cases:
            (output,) = generate(llm, [case["prompt_token_ids"]], len(case["token_ids"]))
            assert list(output.outputs[0].token_ids) == case["token_ids"]
            assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint_format", ["safetensors", "gguf-f32"])
@pytest.mark.parametrize("model", MODELS)
def test_together(tiny: Tiny, reference: Reference, model: str, checkpoint_format: str, schedule: str) -> None:
    cases = reference(model)["cases"]
    with open_llm(tiny(model, checkpoint_format), **SCHEDULES[schedule]) as llm:
        outputs = generate(llm, [case["prompt_token_ids"] for case in cases], len(cases[0]["token_ids"]))
    assert token_ids(outputs) == [case["token_ids"] for case in cases]


@pytest.mark.parametrize("checkpoint_format", ["safetensors", "gguf-f32"])
@pytest.mark.parametrize("model", MODELS)
def test_preempted(tiny: Tiny, reference: Reference, model: str, checkpoint_format: str) -> None:
    """KV memory for little more than the longest request: the others are preempted and recomputed."""
    cases = [case for case in reference(model)["cases"] if len(case["prompt_token_ids"]) <= 120]
    longest = max(len(case["prompt_token_ids"]) + len(case["token_ids"]) for case in cases)
    options = {"block_size": 8, "num_gpu_blocks_override": longest // 8 + 4, "max_model_len": longest}
    with open_llm(tiny(model, checkpoint_format), **options) as llm:
        outputs = generate(llm, [case["prompt_token_ids"] for case in cases], len(cases[0]["token_ids"]))
        assert llm.get_stats()["num_preemptions"] > 0
    assert token_ids(outputs) == [case["token_ids"] for case in cases]


@pytest.mark.parametrize("checkpoint_format", ["safetensors", "gguf-f32"])
@pytest.mark.parametrize("model", MODELS)
def test_prefix_hits(tiny: Tiny, reference: Reference, model: str, checkpoint_format: str) -> None:
    """The second time, and after a prompt that continues the first, the prefix comes from the cache."""
    case = max(reference(model)["cases"], key=lambda c: len(c["prompt_token_ids"]))
    prompt, expected = case["prompt_token_ids"], case["token_ids"]
    with open_llm(tiny(model, checkpoint_format), block_size=4) as llm:
        for part in (prompt[: len(prompt) // 2], prompt, prompt, prompt + expected[:20]):
            (output,) = generate(llm, [part], 28)
        assert output.num_cached_tokens == len(prompt) + 20 - 1
        assert list(output.outputs[0].token_ids) == expected[20:48]
        (again,) = generate(llm, [prompt], len(expected))
        assert again.num_cached_tokens == len(prompt) - 1
        assert list(again.outputs[0].token_ids) == expected


@pytest.mark.parametrize("weight_type", ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_weight_types(tiny: Tiny, reference: Reference, weight_type: str) -> None:
    """Stored weights, computed with in float32, give the tokens of their dequantised values."""
    _check_weight_type(tiny, reference, "llama", weight_type)


@pytest.mark.parametrize("weight_type", ["q4_k", "q5_k", "q6_k"])
def test_k_quants(tiny: Tiny, reference: Reference, weight_type: str) -> None:
    _check_weight_type(tiny, reference, "llama_wide", weight_type)


def _check_weight_type(tiny: Tiny, reference: Reference, model: str, weight_type: str) -> None:
    cases = reference(f"{model}.{weight_type}")["cases"]
    path = tiny(model, f"gguf-{weight_type}")
    with open_llm(path, activation_dtype="float32", kv_cache_dtype="float32") as llm:
        outputs = generate(llm, [case["prompt_token_ids"] for case in cases], len(cases[0]["token_ids"]))
    assert token_ids(outputs) == [case["token_ids"] for case in cases]


@pytest.mark.parametrize("checkpoint_format", ["safetensors-sharded", "safetensors-bf16", "safetensors-f16"])
def test_safetensors_variants(tiny: Tiny, reference: Reference, checkpoint_format: str) -> None:
    dtype = checkpoint_format.removeprefix("safetensors-")
    cases = reference("llama" if dtype == "sharded" else f"llama.{dtype}")["cases"]
    with open_llm(tiny("llama", checkpoint_format), kv_cache_dtype="float32") as llm:
        outputs = generate(llm, [case["prompt_token_ids"] for case in cases], len(cases[0]["token_ids"]))
    assert token_ids(outputs) == [case["token_ids"] for case in cases]


@pytest.mark.parametrize("model", [*MODELS, "llama_wide"])
def test_logprobs_equal_the_reference(tiny: Tiny, reference: Reference, model: str) -> None:
    from trivet import SamplingParams

    cases = reference(model)["cases"]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, ignore_eos=True)
    with open_llm(tiny(model, "safetensors")) as llm:
        outputs = llm.generate([{"prompt_token_ids": case["prompt_token_ids"]} for case in cases], params)
    for output, case in zip(outputs, cases, strict=True):
        (position,) = output.outputs[0].logprobs
        got = {i: entry.logprob for i, entry in position.items() if entry.rank <= 20}
        expected = dict(case["first_logprobs"])
        assert got.keys() == expected.keys()
        assert got == pytest.approx(expected, abs=2e-4)
