"""Whole tiny models on a CUDA device: greedy tokens equal the CPU's in float32, captured steps equal eager ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from trivet.backends.contract.manifest import read_manifest
from trivet.backends.errors import KernelError, LibraryNotFoundError, UnsupportedDeviceError
from trivet.backends.session import ModelSession
from trivet.exporters import export

from ..kernels.steps import BLOCK_SIZE, step_inputs
from .require import needs_device

PROMPT = [int(t) for t in np.random.default_rng(0).integers(3, 300, 90)]
MODELS = [
    *((name, "safetensors") for name in ("llama", "llama_tied", "llama3", "mistral", "qwen2", "qwen3", "gemma3")),
    *(("llama", f"gguf-{fmt}") for fmt in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")),
    *(("llama_wide", f"gguf-{fmt}") for fmt in ("q4_k", "q5_k", "q6_k")),
    ("llama", "safetensors-bf16"),
    ("llama", "safetensors-f16"),
]
TOKENS = ["sampled_token_ids"]


def open_session(package: Path, device: str, dtype: str = "float32", activation_dtype: str = "float32") -> ModelSession:
    session = ModelSession(package, read_manifest(package), device=device, activation_dtype=activation_dtype)
    session.allocate_kv_cache(num_blocks=64, block_size=BLOCK_SIZE, dtype=dtype)
    return session


def generate(
    session: ModelSession, prompt: list[int], count: int, outputs: list[str], first_block: int = 1
) -> list[int]:
    """Greedy tokens; the prompt goes in two chunks."""
    session.run(step_inputs(prompt[:37], 0, first_block=first_block), outputs)
    tokens: list[int] = []
    chunk, done = prompt[37:], 37
    for _ in range(count):
        token = session.run(step_inputs(chunk, done, first_block=first_block), outputs)["sampled_token_ids"][0]
        done += len(chunk)
        chunk = [int(token)]
        tokens.append(int(token))
    return tokens


def merged(steps: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """One decode step of several requests."""
    width = max(s["block_table"].shape[1] for s in steps)
    inputs = {n: np.concatenate([s[n] for s in steps]) for n in ("input_ids", "positions", "slot_mapping", "seq_lens")}
    inputs |= {n: np.concatenate([s[n] for s in steps]) for n in ("sampling_floats", "sampling_ints")}
    inputs["block_table"] = np.zeros((len(steps), width), np.int32)
    for row, step in enumerate(steps):
        table = step["block_table"][0]
        inputs["block_table"][row, : len(table)] = table
    inputs["logits_indices"] = np.arange(len(steps), dtype=np.int32)
    inputs["query_start_loc"] = np.arange(len(steps) + 1, dtype=np.int32)
    for name, value in steps[0].items():
        if name not in inputs:
            inputs[name] = np.zeros(len(steps) + 1, value.dtype) if name.endswith("_loc") else value
    return inputs


@needs_device
@pytest.mark.parametrize(("name", "fmt"), MODELS, ids=[f"{n}-{f}" for n, f in MODELS])
def test_greedy_tokens_equal_the_cpu(name: str, fmt: str, tiny: Callable[[str, str], Path], tmp_path: Path) -> None:
    package = export(tiny(name, fmt), tmp_path / "package", verify=False)
    expected = generate(open_session(package, "cpu"), PROMPT, 40, TOKENS)
    assert generate(open_session(package, "cuda"), PROMPT, 40, TOKENS) == expected
    assert len(set(expected)) > 3


@needs_device
def test_a_prompt_continues_in_copied_blocks(tiny: Callable[[str, str], Path], tmp_path: Path) -> None:
    package = export(tiny("llama", "safetensors"), tmp_path / "package", verify=False)
    session = open_session(package, "cuda")
    expected = generate(session, PROMPT, 20, TOKENS)
    session.copy_blocks([(block, block + 20) for block in range(1, 7)])  # five blocks and ten tokens of the sixth
    chunk, done, tokens = PROMPT[85:], 85, []
    for _ in expected:
        token = int(session.run(step_inputs(chunk, done, first_block=21), TOKENS)["sampled_token_ids"][0])
        done, chunk = done + len(chunk), [token]
        tokens.append(token)
    assert tokens == expected


@needs_device
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("activation_dtype", ["float32", "int8"])
def test_captured_equals_eager(
    dtype: str, activation_dtype: str, tiny: Callable[[str, str], Path], tmp_path: Path
) -> None:
    package = export(tiny("llama_wide", "gguf-q4_k"), tmp_path / "package", verify=False)
    captured = generate(open_session(package, "cuda", dtype, activation_dtype), PROMPT, 40, TOKENS)
    eager = generate(open_session(package, "cuda", dtype, activation_dtype), PROMPT, 40, [*TOKENS, "logits"])
    assert captured == eager


@needs_device
@pytest.mark.parametrize("rows", [[], [40], [7, 0, 7], [*range(60, 30, -1)]], ids=len)
@pytest.mark.parametrize(
    ("name", "fmt"), [("llama_wide", "gguf-q4_k"), ("llama", "safetensors"), ("gemma3", "gguf-q8_0")]
)
@pytest.mark.parametrize("activation_dtype", ["float32", "int8"])
def test_logits_are_of_the_sampled_rows(
    activation_dtype: str, name: str, fmt: str, rows: list[int], tiny: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Those that a step of which all rows are sampled has, but for the kernels that other numbers of rows take."""
    package = export(tiny(name, fmt), tmp_path / "package", verify=False)
    session = open_session(package, "cuda", activation_dtype=activation_dtype)
    whole = session.run(step_inputs(PROMPT, 0, sampled=range(len(PROMPT))), ["logits"])["logits"].copy()
    some = session.run(step_inputs(PROMPT, 0, sampled=rows), ["logits"])["logits"]
    assert some.shape == (len(rows), whole.shape[1])
    bound = (1e-5 if activation_dtype == "float32" else 0.2) * np.abs(whole).max()
    assert (np.abs(some - whole[rows]) <= bound).all()
    assert all(np.abs(whole[row] - whole[other]).max() > bound for row in rows for other in (row - 1, row - 2))


@needs_device
@pytest.mark.parametrize("activation_dtype", ["float32", "int8"])
def test_batched_decode_equals_alone(activation_dtype: str, tiny: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Three requests in a padded step of four."""
    package = export(tiny("llama_wide", "gguf-q8_0"), tmp_path / "package", verify=False)
    prompts = [PROMPT, PROMPT[:50], PROMPT[40:]]
    alone = [
        generate(open_session(package, "cuda", "float16", activation_dtype), prompt, 20, TOKENS) for prompt in prompts
    ]
    session = open_session(package, "cuda", "float16", activation_dtype)
    blocks = [1, 20, 40]
    last = [generate(session, p, 1, TOKENS, first)[0] for p, first in zip(prompts, blocks, strict=True)]
    together = [[token] for token in last]
    for i in range(19):
        steps = [
            step_inputs([tokens[-1]], len(p) + i, first_block=first)
            for tokens, p, first in zip(together, prompts, blocks, strict=True)
        ]
        for tokens, token in zip(together, session.run(merged(steps), TOKENS)["sampled_token_ids"], strict=True):
            tokens.append(int(token))
    assert together == alone


@needs_device
@pytest.mark.parametrize("name", ["llama", "llama_wide"])
def test_captured_steps_leave_each_other_alone(name: str, tiny: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Larger steps come after smaller ones were captured; those run again, and then the larger ones do."""
    package = export(tiny(name, "gguf-q8_0"), tmp_path / "package", verify=False)
    session = open_session(package, "cuda")
    prompts = [(PROMPT[i : i + 70], 1 + 5 * i) for i in range(12)]  # five blocks each; in steps that are not split
    tokens = [session.run(step_inputs(p, 0, first_block=first), TOKENS)["sampled_token_ids"][0] for p, first in prompts]
    steps = [
        step_inputs([int(token)], len(p), first_block=first) for token, (p, first) in zip(tokens, prompts, strict=True)
    ]
    expected = [int(session.run(step, TOKENS)["sampled_token_ids"][0]) for step in steps]
    for size in (2, 4, 8, 12):
        for rows in (size, size, size, 1, size // 2, size):
            got = session.run(merged(steps[:rows]), TOKENS)["sampled_token_ids"]
            assert got.tolist() == expected[:rows], (size, rows)


@needs_device
def test_a_bad_value_fails_the_step_and_the_session_goes_on(tiny: Callable[[str, str], Path], tmp_path: Path) -> None:
    package = export(tiny("llama", "safetensors"), tmp_path / "package", verify=False)
    session = open_session(package, "cuda")
    good = generate(session, PROMPT, 5, TOKENS)
    for run in range(3):  # eager, captured, replayed
        bad = step_inputs([5], 95) | {"input_ids": np.array([99999], np.int32)}
        with pytest.raises(KernelError, match=r"EmbedTokens .*input_ids\[0\]: expected an id from 0 to 383, got 99999"):
            session.run(bad, TOKENS)
        assert generate(session, PROMPT, 5, TOKENS) == good, run


@pytest.mark.parametrize("device", ["cuda:99", "cuda:x", "cuda:-1", "cuda:", "rocm"])
def test_devices_that_do_not_exist_are_named(device: str, tiny: Callable[[str, str], Path], tmp_path: Path) -> None:
    package = export(tiny("llama", "safetensors"), tmp_path / "package", verify=False)
    with pytest.raises(
        (UnsupportedDeviceError, LibraryNotFoundError), match=rf"device '?{device}'?|built without CUDA"
    ):
        open_session(package, device)
