"""The engine on a CUDA device: the same outputs as on the CPU, with preemption, prefix hits and sampling features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trivet import LLM, SamplingParams
from trivet.runtime.errors import TrivetError

from .require import needs_device

PREFIX = [11, 12, 13, 14, 15, 16, 17, 18] * 5
PROMPTS = [[*PREFIX, *range(20 + i, 40 + 3 * i)] for i in range(8)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=5, max_tokens=30, ignore_eos=True),
    SamplingParams(
        temperature=0.7, seed=9, repetition_penalty=1.3, presence_penalty=0.2, max_tokens=30, ignore_eos=True
    ),
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, logit_bias={7: 5.0}, max_tokens=12, ignore_eos=True),
]


def outputs(checkpoint: Path, device: str, **options: Any) -> list[list[int]]:
    options = {"activation_dtype": "float32", "kv_cache_dtype": "float32", "max_model_len": 256} | options
    with LLM(str(checkpoint), device=device, **options) as llm:
        params = [PARAMS[i % len(PARAMS)] for i in range(len(PROMPTS))]
        return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params)]


@needs_device
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_the_engine_gives_the_cpu_outputs(name: str, tiny: Callable[[str, str], Path], trivet_home: Path) -> None:
    checkpoint = tiny(name, "safetensors")
    expected = outputs(checkpoint, "cpu")
    assert outputs(checkpoint, "cuda", gpu_memory_utilization=0.05) == expected
    # 18 blocks hold two of the sequences: the others wait or are preempted.
    assert outputs(checkpoint, "cuda:0", num_gpu_blocks_override=18) == expected


@needs_device
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_fp8_cache_gives_the_same_outputs_with_preemption(
    name: str, tiny: Callable[[str, str], Path], trivet_home: Path
) -> None:
    checkpoint = tiny(name, "safetensors")
    options = {"kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.05}
    expected = outputs(checkpoint, "cuda", **options)
    assert all(len(tokens) in (12, 30) for tokens in expected)
    assert outputs(checkpoint, "cuda", **options, num_gpu_blocks_override=18) == expected


@needs_device
def test_a_cache_that_does_not_fit_is_refused_with_the_figures(
    tiny: Callable[[str, str], Path], trivet_home: Path
) -> None:
    with pytest.raises(TrivetError, match=r"cannot allocate \d+ bytes on device 0: out of memory|no KV cache of"):
        LLM(str(tiny("llama", "safetensors")), device="cuda", kv_cache_memory_bytes=1 << 40)


@pytest.mark.parametrize("device", ["cuda:x", "gpu", "cuda:-1"])
def test_device_names_are_checked(device: str, tiny: Callable[[str, str], Path], trivet_home: Path) -> None:
    with pytest.raises(TrivetError, match=rf"device is '{device}'; expected 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        LLM(str(tiny("llama", "safetensors")), device=device)


def test_a_device_that_is_not_there_is_refused(tiny: Callable[[str, str], Path], trivet_home: Path) -> None:
    with pytest.raises(TrivetError, match=r"cuda:99|no usable NVIDIA driver|built without CUDA"):
        LLM(str(tiny("llama", "safetensors")), device="cuda:99")
