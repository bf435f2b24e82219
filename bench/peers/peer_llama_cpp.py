"""llama.cpp through the C interface of llama-cpp-python: its own batching, no Python beyond one call a step.

Sampling is an argmax over the logits. Flash attention is tried on and off for every cell but those of a shared prefix,
which have it on; the faster one is measured.
Steps of `concurrent` mix running answers and prompts of up to one micro-batch, as llama.cpp's server does.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import llama_cpp as lc
import numpy as np
from protocol import serve, token_ids

Measure = Callable[[bool], dict[str, Any]]  # flash attention -> result

_BATCH = 512  # llama.cpp's own default of a micro-batch


class LlamaCpp:
    def load(self, *, model: str, threads: int, context: int) -> dict[str, Any]:
        self._quiet = lc.llama_log_callback(lambda level, text, data: None)
        lc.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lc.llama_backend_init()
        self._threads, self._context = threads, context
        start = time.perf_counter()
        self._model = lc.llama_model_load_from_file(os.fsencode(model), lc.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocab_size = int(lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self._model)))
        self._ctx: Any = None
        self._shape: tuple[int, int, bool] | None = None
        self._faster: dict[tuple[Any, ...], bool] = {}  # cell -> flash attention
        self._use(1, context, True)
        seconds = time.perf_counter() - start
        features = lc.llama_print_system_info().decode().strip()
        return {
            "version": f"llama-cpp-python {lc.__version__}",
            "settings": {"kv_cache_dtype": "float16", "micro_batch": _BATCH, "system_info": features},
            "seconds": seconds,
        }

    def _use(self, sequences: int, context_each: int, flash_attention: bool) -> None:
        """Make an empty context of this shape the current one; the last one is kept if it has the shape."""
        self._decoded: int | None = None  # tokens of the prompt of `decode`, while the cache holds them
        shape = (sequences, context_each, flash_attention)
        if shape == self._shape:
            lc.llama_memory_clear(lc.llama_get_memory(self._ctx), False)
            return
        if self._ctx is not None:
            lc.llama_free(self._ctx)
        params = lc.llama_context_default_params()
        params.n_ctx = sequences * ((context_each + 255) // 256 * 256)
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = 1 if flash_attention else 0
        params.no_perf = True
        self._ctx = lc.llama_init_from_model(self._model, params)
        if not self._ctx:
            raise RuntimeError(f"llama.cpp makes no context of {sequences} x {context_each} tokens")
        self._shape = shape

    def _step(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wants logits) entries; the best token of each that wants logits."""
        batch = lc.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for i, (token, position, sequence, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = wanted
            if (status := lc.llama_decode(self._ctx, batch)) != 0:
                raise RuntimeError(f"llama_decode returned {status}")
            wanting = [i for i, entry in enumerate(entries) if entry[3]]
            return [self._best(i) for i in wanting]
        finally:
            lc.llama_batch_free(batch)

    def _best(self, index: int) -> int:
        logits = lc.llama_get_logits_ith(self._ctx, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def _feed(self, ids: list[int], sequence: int, position: int = 0) -> int:
        """Compute a prompt; the token after it."""
        best = [0]
        for start in range(0, len(ids), _BATCH):
            part = ids[start : start + _BATCH]
            last = start + len(part) == len(ids)
            entries = [(t, position + start + i, sequence, last and i == len(part) - 1) for i, t in enumerate(part)]
            best = self._step(entries) or best
        return best[0]

    def _with_faster_attention(self, cell: tuple[Any, ...], measure: Measure) -> dict[str, Any]:
        """measure(flash_attention) with the faster setting, found in the first call."""
        if cell not in self._faster:
            if not self._faster:
                measure(True)  # the first run of all reads the weights from the file: it decides nothing
            on, off = measure(True), measure(False)
            self._faster[cell] = on["seconds"] <= off["seconds"]
            return on if self._faster[cell] else off
        flash_attention = self._faster[cell]
        return measure(flash_attention) | {"flash_attention": flash_attention}

    def first_token(self, *, tokens: int) -> dict[str, Any]:
        self._use(1, self._context, True)
        self._feed(token_ids(tokens, 0, self._vocab_size), 0)
        return {}

    def prefill(self, *, tokens: int, seed: int) -> dict[str, Any]:
        ids = token_ids(tokens, seed, self._vocab_size)

        def measure(flash_attention: bool) -> dict[str, Any]:
            self._use(1, self._context, flash_attention)
            start = time.perf_counter()
            self._feed(ids, 0)
            return {"seconds": time.perf_counter() - start}

        return self._with_faster_attention(("prefill", tokens), measure)

    def decode(self, *, context: int, tokens: int) -> dict[str, Any]:
        ids = token_ids(context, 0, self._vocab_size)

        def measure(flash_attention: bool) -> dict[str, Any]:
            if self._decoded == context and self._shape == (1, self._context, flash_attention):
                lc.llama_memory_seq_rm(lc.llama_get_memory(self._ctx), 0, context - 1, -1)
                token = self._feed(ids[-1:], 0, context - 1)
            else:
                self._use(1, self._context, flash_attention)
                token = self._feed(ids, 0)
            self._decoded = context
            start = time.perf_counter()
            for position in range(context, context + tokens):
                token = self._step([(token, position, 0, True)])[0]
            return {"seconds": time.perf_counter() - start, "tokens": tokens}

        return self._with_faster_attention(("decode", context), measure)

    def concurrent(self, *, requests: int, prompt: int, output: int, seed: int) -> dict[str, Any]:
        prompts = [token_ids(prompt, seed * 1000 + index, self._vocab_size) for index in range(requests)]

        def measure(flash_attention: bool) -> dict[str, Any]:
            self._use(requests, prompt + output, flash_attention)
            return self._all_at_once(prompts, output, [0] * requests)

        return self._with_faster_attention(("concurrent", requests, prompt), measure)

    def shared_prefix(
        self, *, requests: int, prefix: int, tail: int, output: int, seed: int, warm: bool
    ) -> dict[str, Any]:
        """Cold: every sequence computes the prefix, as in llama.cpp's server. Warm: all sequences hold a copy."""
        common = token_ids(prefix, 500_000 + seed, self._vocab_size)
        tails = [token_ids(tail, seed * 1000 + i, self._vocab_size) for i in range(requests)]
        self._use(requests, prefix + tail + output, True)
        if not warm:
            return self._all_at_once([common + ids for ids in tails], output, [0] * requests) | {
                "prompt_tokens_computed": requests * (prefix + tail)
            }
        self._feed(common, 0)
        memory = lc.llama_get_memory(self._ctx)
        for sequence in range(1, requests):
            lc.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        result = self._all_at_once(tails, output, [prefix] * requests)
        return result | {"prompt_tokens_computed": requests * tail}

    def _all_at_once(self, prompts: list[list[int]], output: int, starts: list[int]) -> dict[str, Any]:
        """`starts`: positions before each prompt that the cache holds already."""
        done = [0] * len(prompts)  # prompt tokens computed
        last: dict[int, int] = {}  # sequence -> newest token, once its prompt is done
        times: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()
        while len(last) < len(prompts) or any(len(t) < output for t in times):
            entries, owners = [], []
            for sequence, token in last.items():
                if len(times[sequence]) < output:
                    position = starts[sequence] + len(prompts[sequence]) + len(times[sequence]) - 1
                    entries.append((token, position, sequence, True))
                    owners.append(sequence)
            for sequence, ids in enumerate(prompts):
                count = min(_BATCH - len(entries), len(ids) - done[sequence])
                for i in range(done[sequence], done[sequence] + count):
                    entries.append((ids[i], starts[sequence] + i, sequence, i == len(ids) - 1))
                done[sequence] += count
                if count and done[sequence] == len(ids):
                    owners.append(sequence)
            best = self._step(entries)
            now = time.perf_counter()
            for sequence, token in zip(owners, best, strict=True):
                last[sequence] = token
                times[sequence].append(now)
        seconds = time.perf_counter() - start
        gaps = [b - a for moments in times for a, b in pairwise(moments)]
        tokens = len(prompts) * output
        return {"seconds": seconds, "tokens": tokens, "ttft": [t[0] - start for t in times], "itl": gaps}


if __name__ == "__main__":
    serve(LlamaCpp())
