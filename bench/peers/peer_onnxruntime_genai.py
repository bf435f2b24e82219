"""onnxruntime-genai on the CPU; the model is a folder of its model builder. Many requests are one static batch."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnxruntime_genai as genai
from protocol import serve, token_ids


class OnnxRuntimeGenai:
    def load(self, *, model: str, threads: int, context: int) -> dict[str, Any]:
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        start = time.perf_counter()
        config = genai.Config(model)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = genai.Model(config)
        seconds = time.perf_counter() - start
        self._vocab_size = json.loads((Path(model) / "genai_config.json").read_text())["model"]["vocab_size"]
        self._decoding: tuple[int, Any] | None = None  # context of `decode`, and the generator that holds it
        return {
            "version": f"onnxruntime-genai {genai.__version__}",
            "settings": {"batching": "static", "session_options": options},
            "seconds": seconds,
        }

    def _generator(self, sequences: int, length: int) -> Any:
        params = genai.GeneratorParams(self._model)
        params.set_search_options(
            max_length=length,
            min_length=length,
            do_sample=False,
            batch_size=sequences,
            past_present_share_buffer=True,
        )
        return genai.Generator(self._model, params)

    def _generate(self, prompts: list[list[int]], output: int) -> tuple[float, list[float]]:
        """The start, and when each token of the batch came."""
        self._decoding = None
        generator = self._generator(len(prompts), len(prompts[0]) + output)
        times = []
        start = time.perf_counter()
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        for _ in range(output):
            generator.generate_next_token()
            times.append(time.perf_counter())
        return start, times

    def first_token(self, *, tokens: int) -> dict[str, Any]:
        self._generate([token_ids(tokens, 0, self._vocab_size)], 1)
        return {}

    def prefill(self, *, tokens: int, seed: int) -> dict[str, Any]:
        start, times = self._generate([token_ids(tokens, seed, self._vocab_size)], 1)
        return {"seconds": times[0] - start}

    def decode(self, *, context: int, tokens: int) -> dict[str, Any]:
        """The prompt is computed the first time; later the generator goes back to its last token."""
        ids = token_ids(context, 0, self._vocab_size)
        if self._decoding is not None and self._decoding[0] == context:
            generator = self._decoding[1]
            generator.rewind_to(context - 1)
            generator.append_tokens(np.array([ids[-1:]], dtype=np.int32))
        else:
            self._decoding = None  # frees its cache first
            generator = self._generator(1, context + tokens + 1)
            generator.append_tokens(np.array([ids], dtype=np.int32))
            self._decoding = (context, generator)
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(tokens):
            generator.generate_next_token()
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def concurrent(self, *, requests: int, prompt: int, output: int, seed: int) -> dict[str, Any]:
        prompts = [token_ids(prompt, seed * 1000 + index, self._vocab_size) for index in range(requests)]
        return self._many(prompts, output)

    def shared_prefix(
        self, *, requests: int, prefix: int, tail: int, output: int, seed: int, warm: bool
    ) -> dict[str, Any]:
        if warm:
            raise NotImplementedError("sequences of a batch cannot start from one cached prefix")
        common = token_ids(prefix, 500_000 + seed, self._vocab_size)
        prompts = [common + token_ids(tail, seed * 1000 + i, self._vocab_size) for i in range(requests)]
        return self._many(prompts, output) | {"prompt_tokens_computed": requests * (prefix + tail)}

    def _many(self, prompts: list[list[int]], output: int) -> dict[str, Any]:
        start, times = self._generate(prompts, output)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return {
            "seconds": times[-1] - start,
            "tokens": len(prompts) * output,
            "ttft": [times[0] - start] * len(prompts),
            "itl": gaps * len(prompts),
        }


if __name__ == "__main__":
    serve(OnnxRuntimeGenai())
