"""Requests to an AsyncLLM, for the tests of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from trivet import AsyncLLM, RequestOutput, SamplingParams
from trivet.runtime.sampling_params import RequestOutputKind

PROMPTS = [[40 + (7 * i + j) % 80 for j in range(3 + 5 * i)] for i in range(16)]


def greedy(num_tokens: int, kind: RequestOutputKind = RequestOutputKind.DELTA, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=kind, **options)


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, request_id)]


def run(package: str, use: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run `use` with an engine; afterwards nothing may be left in it."""

    async def main() -> None:
        async with AsyncLLM(package, **options) as engine:
            await asyncio.wait_for(use(engine), timeout=60)
            await idle(engine)

    asyncio.run(main())


def slowly(session: Any) -> None:
    """A toy's step, that a busy machine does not get ahead of the test with."""
    time.sleep(0.005)


async def idle(engine: AsyncLLM) -> None:
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not engine.errored:
        stats = engine.get_stats()
        if not any(stats[k] for k in ("num_requests_running", "num_requests_waiting", "kv_cache_usage")):
            assert engine._output_processor.num_unfinished_requests == 0
            return
        await asyncio.sleep(0.002)
    assert engine.errored, f"requests are left: {engine.get_stats()}"
