"""Real models on a CUDA device against the CPU back end: what verify_cuda.py's step `models` does."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import perplexity_windows as ppl
from numpy.typing import NDArray
from trivet import LLM, SamplingParams
from trivet.backends.contract.manifest import read_manifest
from trivet.backends.cuda.session import CudaSession
from trivet.backends.session import ModelSession
from trivet.exporters import export

MAX_MODEL_LEN = 1024
# Nats between two tokens of which rounding may pick either; with float32 activations, which differ by the order of sums
# and by the type of the KV cache. As activations are rounded by default, to int8 on the CPU and in small steps on a
# device and to bfloat16 in its large ones, log-probabilities move by some 0.1, those of gemma-3-270m by up to 1.0: what
# that changes is shown, and judged by the perplexity.
NEAR_TIE = 0.25
EXACT: dict[str, Any] = {"activation_dtype": "float32"}
PERPLEXITY_BAR = 0.01  # relative to the CPU's
NUM_TOKENS = 48
_STEPS = runpy.run_path(str(Path(__file__).parents[1] / "kernels" / "steps.py"))  # not importable from a script
BLOCK_SIZE, step_inputs = _STEPS["BLOCK_SIZE"], _STEPS["step_inputs"]
HEADER = (
    *("model", "ppl cpu", "ppl cuda", "differs", "greedy=cpu", "captured=eager", "batch 1=64", "preempted=alone"),
    *("int8: greedy/cpu", "int8: batch 1/64"),
)


def params(logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=logprobs)


def prompts_of(token_ids: list[int], count: int, shared: int = 0) -> list[list[int]]:
    """`count` different prompts, after `shared` tokens that all of them begin with."""
    starts = np.linspace(0, len(token_ids) - 100, count).astype(int).tolist()
    return [token_ids[:shared] + token_ids[s : s + 24 + i * 3 % 40] for i, s in enumerate(starts)]


def generate(llm: LLM, prompts: list[list[int]], logprobs: int | None = None) -> list[Any]:
    return [out.outputs[0] for out in llm.generate([{"prompt_token_ids": p} for p in prompts], params(logprobs))]


def compare(reference: list[Any], others: list[Any]) -> dict[str, Any]:
    """Tokens of `others` against a reference with logprobs: equal, or apart from a near tie on."""
    worst, apart = 0.0, 0
    for expected, got in zip(reference, others, strict=True):
        pairs = list(zip(expected.token_ids, got.token_ids, strict=True))
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if index is None:
            continue
        apart += 1
        known = {token: value.logprob for token, value in expected.logprobs[index].items()}
        worst = max(worst, known[pairs[index][0]] - known.get(pairs[index][1], -math.inf))
    return {"ok": worst <= NEAR_TIE, "sequences": len(reference), "apart": apart, "worst_gap": worst}


def perplexity(llm: LLM, windows: list[list[int]]) -> float:
    settings = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    nll, count = 0.0, 0
    for output in llm.generate([{"prompt_token_ids": window} for window in windows], settings):
        assert output.prompt_logprobs is not None
        for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert position is not None
            nll -= position[token].logprob
            count += 1
    return math.exp(nll / count)


def decode(package: Path, prompt: list[int], outputs: list[str]) -> tuple[list[int], NDArray[np.uint8]]:
    """Greedy tokens, and the KV cache that all steps have left."""
    session = ModelSession(package, read_manifest(package), device="cuda")
    num_bytes = session.allocate_kv_cache(num_blocks=17, block_size=BLOCK_SIZE, dtype="float16")
    tokens, chunk, done = [], prompt, 0
    for _ in range(NUM_TOKENS):
        token = int(session.run(step_inputs(chunk, done), outputs)["sampled_token_ids"][0])
        done += len(chunk)
        chunk = [token]
        tokens.append(token)
    cache = np.empty(num_bytes, np.uint8)
    inner = session._device
    assert isinstance(inner, CudaSession) and inner._kv is not None
    inner._device.copy(cache.ctypes.data, inner._kv["address"], num_bytes)
    inner._device.finish()
    session.close()
    return tokens, cache


def captured_equals_eager(path: Path, prompt: list[int]) -> dict[str, Any]:
    """Bit for bit: the same tokens, and the same keys and values of every layer."""
    package = path if path.is_dir() else export(path)
    tokens, cache = decode(package, prompt, ["sampled_token_ids"])
    with_a_second_output = ["sampled_token_ids", "logits"]  # such a step is not captured
    eager_tokens, eager_cache = decode(package, prompt, with_a_second_output)
    differing = int((cache != eager_cache).sum())
    return {"ok": tokens == eager_tokens and differing == 0, "tokens_equal": tokens == eager_tokens, "bytes": differing}


def preempted_equals_alone(
    path: Path, prompts: list[list[int]], alone: list[Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Answers to the eight prompts in 24 blocks, which hold three of them: the others wait, or are preempted."""
    with LLM(str(path), num_gpu_blocks_override=24, **(options | {"max_model_len": 256})) as llm:
        result = compare(alone, generate(llm, prompts))
        stats = llm.get_stats()
    result |= {"preemptions": stats["num_preemptions"], "prefix_hits": stats["prefix_cache_hits"]}
    result["ok"] &= stats["num_preemptions"] > 0 and stats["prefix_cache_hits"] > 0
    return result


def check_model(path: Path) -> dict[str, Any]:
    """All figures of one model; "ok" is whether every one is within its bar."""
    options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN}
    with LLM(str(path), device="cpu", **options) as llm:
        token_ids = llm.get_tokenizer().encode(ppl.text(), add_special_tokens=False)
        bos = llm.manifest.tokenizer.bos_token_id if llm.manifest.tokenizer.add_bos else None
        windows, few = ppl.windows(token_ids, bos), prompts_of(token_ids, 8)
        cpu_perplexity = perplexity(llm, windows)
        cpu = generate(llm, few, logprobs=5)
    with LLM(str(path), device="cpu", **options, **EXACT) as llm:
        exact_cpu = generate(llm, few, logprobs=5)
    options |= {"device": "cuda", "require_gpu": True, "gpu_memory_utilization": 0.1}
    many, shared = prompts_of(token_ids, 64), prompts_of(token_ids, 8, shared=48)
    with LLM(str(path), **options) as llm:
        cuda_perplexity = perplexity(llm, windows)
        int8_greedy = compare(cpu, generate(llm, few))
        together = generate(llm, many)
    one_at_a_time: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
    with LLM(str(path), **one_at_a_time, **options) as llm:
        int8_batch = compare(generate(llm, many, logprobs=5), together)
    options |= EXACT
    with LLM(str(path), **options) as llm:
        greedy = compare(exact_cpu, generate(llm, few))
        together = generate(llm, many)
    with LLM(str(path), **one_at_a_time, **options) as llm:
        batch = compare(generate(llm, many, logprobs=5), together)
        alone = generate(llm, shared, logprobs=5)
    preempted = preempted_equals_alone(path, shared, alone, options)
    difference = cuda_perplexity / cpu_perplexity - 1
    captured = captured_equals_eager(path, many[3])
    ok = abs(difference) <= PERPLEXITY_BAR and all(r["ok"] for r in (greedy, batch, preempted, captured))
    return {
        "model": path.name,
        "ok": ok,
        "perplexity_cpu": cpu_perplexity,
        "perplexity_cuda": cuda_perplexity,
        "difference": difference,
        "greedy": greedy,
        "captured": captured,
        "batch": batch,
        "preempted": preempted,
        "int8_greedy": int8_greedy,
        "int8_batch": int8_batch,
    }


def _cell(result: dict[str, Any]) -> str:
    text = "ok" if result["ok"] else "FAILED"
    return f"{text} ({_apart(result)})" if result.get("apart") else text


def _apart(result: dict[str, Any]) -> str:
    return f"{result['apart']}/{result['sequences']} apart after a tie of {result['worst_gap']:.2f}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [HEADER]
    for row in rows:
        figures = (f"{row['perplexity_cpu']:.4f}", f"{row['perplexity_cuda']:.4f}", f"{row['difference']:+.3%}")
        cells = (_cell(row[name]) for name in ("greedy", "captured", "batch", "preempted"))
        shown = (_apart(row[name]) for name in ("int8_greedy", "int8_batch"))
        lines.append((row["model"], *figures, *cells, *shown))
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
