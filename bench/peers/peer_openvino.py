"""OpenVINO GenAI: its continuous-batching pipeline on the CPU, with prefix caching. The model is an OpenVINO folder.

Steps hold up to 4096 tokens for one request and 256 for many, which suits each best on the CPUs that we tried.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import serve, token_ids

_ALONE, _TOGETHER = 4096, 256  # most tokens of a step
_CACHE_GB = 1
_VOCAB_SIZE = 32000  # token_ids stays below 30000, which every model has


class OpenVino:
    def load(self, *, model: str, threads: int, context: int) -> dict[str, Any]:
        self._model, self._threads = model, threads
        self._pipeline: Any = None
        self._step_tokens = 0
        self._request_ids = iter(range(1, 2**31))
        start = time.perf_counter()
        self._use(_ALONE)
        seconds = time.perf_counter() - start
        settings = {"max_num_batched_tokens": [_ALONE, _TOGETHER], "cache_size_gb": _CACHE_GB}
        return {"version": f"openvino-genai {genai.__version__}", "settings": settings, "seconds": seconds}

    def _use(self, step_tokens: int) -> None:
        if step_tokens == self._step_tokens:
            return
        self._pipeline = None  # frees the other one first
        config = genai.SchedulerConfig()
        config.enable_prefix_caching = True
        config.cache_size = _CACHE_GB
        config.max_num_seqs = 64
        config.max_num_batched_tokens = step_tokens
        config.dynamic_split_fuse = True
        properties = {"INFERENCE_NUM_THREADS": self._threads}
        self._pipeline = genai.ContinuousBatchingPipeline(self._model, config, "CPU", properties)
        self._step_tokens = step_tokens

    def _all_at_once(self, prompts: list[list[int]], output: int) -> tuple[float, list[list[float]]]:
        """The start, and when each token of each prompt came."""
        config = genai.GenerationConfig()
        config.do_sample = False
        config.ignore_eos = True
        config.max_new_tokens = output
        start = time.perf_counter()
        handles = [
            self._pipeline.add_request(next(self._request_ids), ov.Tensor(np.array([ids], dtype=np.int64)), config)
            for ids in prompts
        ]
        times: list[list[float]] = [[] for _ in prompts]
        while any(len(moments) < output for moments in times):
            self._pipeline.step()
            now = time.perf_counter()
            for handle, moments in zip(handles, times, strict=True):
                if handle.can_read():
                    count = sum(len(part.generated_ids) for part in handle.read().values())
                    moments.extend([now] * count)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return start, times

    def first_token(self, *, tokens: int) -> dict[str, Any]:
        self._all_at_once([token_ids(tokens, 0, _VOCAB_SIZE)], 1)
        return {}

    def prefill(self, *, tokens: int, seed: int) -> dict[str, Any]:
        self._use(_ALONE)
        start, times = self._all_at_once([token_ids(tokens, 7919 * seed + tokens, _VOCAB_SIZE)], 1)
        return {"seconds": times[0][0] - start}

    def decode(self, *, context: int, tokens: int) -> dict[str, Any]:
        self._use(_ALONE)
        _, times = self._all_at_once([token_ids(context, 0, _VOCAB_SIZE)], tokens + 1)
        return {"seconds": times[0][-1] - times[0][0], "tokens": tokens}

    def concurrent(self, *, requests: int, prompt: int, output: int, seed: int) -> dict[str, Any]:
        self._use(_TOGETHER)
        first = 1_000_000 * requests + 1000 * seed  # no prompt twice: the prefix cache would have it
        return self._many([token_ids(prompt, first + index, _VOCAB_SIZE) for index in range(requests)], output)

    def shared_prefix(
        self, *, requests: int, prefix: int, tail: int, output: int, seed: int, warm: bool
    ) -> dict[str, Any]:
        self._use(_TOGETHER)
        common = token_ids(prefix, 500_000 + 2 * seed + warm, _VOCAB_SIZE)
        if warm:
            self._all_at_once([[*common, 1000]], 1)
        prompts = [common + token_ids(tail, seed * 1000 + i, _VOCAB_SIZE) for i in range(requests)]
        return self._many(prompts, output) | {"prompt_tokens_computed": None}

    def _many(self, prompts: list[list[int]], output: int) -> dict[str, Any]:
        start, times = self._all_at_once(prompts, output)
        return {
            "seconds": time.perf_counter() - start,
            "tokens": len(prompts) * output,
            "ttft": [moments[0] - start for moments in times],
            "itl": [later - earlier for moments in times for earlier, later in pairwise(moments)],
        }


if __name__ == "__main__":
    serve(OpenVino())
