"""trivet: LLM for one request at a time, AsyncLLM for many."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trivet
from protocol import serve, token_ids
from trivet import LLM, SamplingParams
from trivet.runtime.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from trivet import AsyncLLM


class Trivet:
    def load(self, *, model: str, threads: int, context: int) -> dict[str, Any]:
        self._options: dict[str, Any] = {"num_threads": threads, "max_model_len": context}
        self._model = model
        self._engine: LLM | AsyncLLM | None = None
        self._runner: Any = None
        start = time.perf_counter()
        llm = self._llm()
        seconds = time.perf_counter() - start
        self._vocab_size = llm.manifest.architecture.vocab_size
        settings = {
            "kv_cache_dtype": llm.config.cache_config.cache_dtype,
            "activation_dtype": llm.config.device_config.activation_dtype,
            "max_num_batched_tokens": llm.config.scheduler_config.max_num_batched_tokens,
        }
        return {"version": trivet.__version__, "settings": settings, "seconds": seconds}

    def cost(self) -> dict[str, int]:
        """The bytes that a token reads and the multiplications it needs; no part of a start, so no part of `load`."""
        from trivet.exporters.checkpoint import open_checkpoint

        llm = self._llm()
        manifest, plan = llm.manifest, llm.config.resolved_plan
        source = Path(manifest.source_dir)
        names = [item.name for item in manifest.sources]
        checkpoint = open_checkpoint(source / names[0] if names[0].endswith(".gguf") else source)
        tensors = checkpoint.tensors
        tables = {"token_embd.weight", "model.embed_tokens.weight"} & set(tensors)
        heads = {"output.weight", "lm_head.weight"} & set(tensors)
        table_bytes = sum(tensors[name].nbytes for name in tables)
        bytes_per_token = sum(t.nbytes for t in tensors.values()) - (table_bytes if heads else 0)
        matrices = {name: t for name, t in tensors.items() if len(t.shape) == 2 and name not in tables | heads}
        cost = {
            "weight_bytes_per_token": bytes_per_token,
            "kv_bytes_per_token": plan.page_size_bytes // plan.block_size,
            "body_macs_per_token": sum(t.num_elements for t in matrices.values()),
            "head_macs_per_token": sum(tensors[name].num_elements for name in heads or tables),
        }
        checkpoint.close()
        return cost

    def _llm(self) -> LLM:
        if not isinstance(self._engine, LLM):
            self._close()
            self._engine = LLM(self._model, **self._options)
        return self._engine

    def _async_llm(self) -> AsyncLLM:
        from trivet import AsyncLLM  # here, as asyncio below: a start of LLM needs neither

        if not isinstance(self._engine, AsyncLLM):
            self._close()
            self._engine = AsyncLLM(self._model, **self._options)
        return self._engine

    def _run(self, coroutine: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        import asyncio

        self._runner = self._runner or asyncio.Runner()
        result: dict[str, Any] = self._runner.run(coroutine)
        return result

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    def first_token(self, *, tokens: int) -> dict[str, Any]:
        self._llm().generate(token_ids(tokens, 0, self._vocab_size), _greedy(1))
        return {}

    def prefill(self, *, tokens: int, seed: int) -> dict[str, Any]:
        llm = self._llm()
        llm.reset_prefix_cache()
        ids = token_ids(tokens, seed, self._vocab_size)
        start = time.perf_counter()
        llm.generate(ids, _greedy(1))
        return {"seconds": time.perf_counter() - start}

    def decode(self, *, context: int, tokens: int) -> dict[str, Any]:
        """The prompt is in the prefix cache from the second time on, which is not timed anyway."""
        moments: list[float] = []
        count = 0
        for output in self._llm().stream(token_ids(context, 0, self._vocab_size), _greedy(tokens + 1)):
            moments.append(time.perf_counter())
            count += len(output.outputs[0].token_ids)
        if count != tokens + 1:
            raise RuntimeError(f"{count} tokens came, not {tokens + 1}")
        return {"seconds": moments[-1] - moments[0], "tokens": tokens}

    def concurrent(self, *, requests: int, prompt: int, output: int, seed: int) -> dict[str, Any]:
        self._async_llm().reset_prefix_cache()  # other cells have some of these prompts
        prompts = [token_ids(prompt, seed * 1000 + index, self._vocab_size) for index in range(requests)]
        return self._run(self._all_at_once(prompts, output))

    def shared_prefix(
        self, *, requests: int, prefix: int, tail: int, output: int, seed: int, warm: bool
    ) -> dict[str, Any]:
        common = token_ids(prefix, 500_000 + seed, self._vocab_size)
        prompts = [common + token_ids(tail, seed * 1000 + i, self._vocab_size) for i in range(requests)]
        engine = self._async_llm()
        engine.reset_prefix_cache()
        if warm:
            self._run(self._all_at_once([[*common, 1000]], 1))
        before = engine.get_stats()["num_computed_tokens"]
        result = self._run(self._all_at_once(prompts, output))
        computed = engine.get_stats()["num_computed_tokens"] - before
        return result | {"prompt_tokens_computed": computed - result["tokens"] + requests}

    async def _all_at_once(self, prompts: list[list[int]], output: int) -> dict[str, Any]:
        import asyncio

        engine = self._async_llm()
        start = time.perf_counter()
        arrivals = await asyncio.gather(*(self._follow(engine, prompt, output) for prompt in prompts))
        seconds = time.perf_counter() - start
        gaps = [later - earlier for times in arrivals for earlier, later in pairwise(times)]
        return {
            "seconds": seconds,
            "tokens": len(prompts) * output,
            "ttft": [times[0] - start for times in arrivals],
            "itl": gaps,
        }

    async def _follow(self, engine: AsyncLLM, prompt: list[int], output: int) -> list[float]:
        times, count = [], 0
        async for delta in engine.generate(prompt, _greedy(output)):
            times.append(time.perf_counter())
            count += len(delta.outputs[0].token_ids)
        if count != output:
            raise RuntimeError(f"{count} tokens came, not {output}")
        return times


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )


if __name__ == "__main__":
    serve(Trivet())
