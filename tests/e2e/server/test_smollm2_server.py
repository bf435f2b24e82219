"""The server with the real engine on SmolLM2: what runs beside a request changes no bit of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from trivet import AsyncLLM

_SHARED = "You are a careful assistant. Answer in one short sentence, and never guess. Question: "
PROMPTS = [_SHARED + question for question in ("Who?", "Why is the sky blue?", "1 + 1 =", "Name a fruit.")]
PROMPTS += ["Once upon a time", "def fibonacci(n):", "Grüße aus Zürich!", "The capital of France is"]


async def _ask(client: httpx.AsyncClient, url: str, index: int) -> dict[str, Any]:
    """The even ones sample, the odd ones are greedy."""
    body: dict[str, Any] = {"prompt": PROMPTS[index], "max_tokens": 20, "ignore_eos": True, "logprobs": 3}
    body |= {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}
    response = await client.post(f"{url}/v1/completions", json=body)
    return dict(response.raise_for_status().json())


def _choices(answers: Sequence[dict[str, Any]]) -> list[Any]:
    return [answer["choices"] for answer in answers]


def test_batches_prefix_hits_and_preemptions_change_no_bit(
    start_server: Callable[..., Any], smollm2_path: Path
) -> None:
    """Eight different requests at once, on a cache too small for them: tokens and logprobs are those of each alone."""

    async def alone(url: str) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=120) as client:
            return [await _ask(client, url, index) for index in range(len(PROMPTS))]

    async def together(url: str) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=120) as client:
            await _ask(client, url, 0)  # leaves the shared prefix in the cache
            return await asyncio.gather(*(_ask(client, url, index) for index in range(len(PROMPTS))))

    roomy = AsyncLLM(smollm2_path, max_model_len=64, enable_prefix_caching=False)
    expected = asyncio.run(alone(start_server(roomy).url))
    roomy.shutdown()
    small = AsyncLLM(smollm2_path, max_model_len=64, num_gpu_blocks_override=11)
    answers = asyncio.run(together(start_server(small, enable_prompt_tokens_details=True).url))
    stats = small.get_stats()
    small.shutdown()
    assert _choices(answers) == _choices(expected)
    assert stats["num_preemptions"] > 0
    assert sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers) > 0
