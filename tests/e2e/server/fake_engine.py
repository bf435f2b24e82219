"""A stand-in for AsyncLLM with its interface: answers a fixed text, byte by byte, and keeps book of who left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers
from trivet.backends.contract.manifest import (
    SCHEMA_VERSION,
    Architecture,
    GenerationDefaults,
    Manifest,
    TokenizerSpec,
    Verification,
)
from trivet.backends.devices import DeviceChoice
from trivet.runtime.errors import EngineDeadError
from trivet.runtime.outputs import CompletionOutput, Logprob, RequestOutput
from trivet.runtime.sampling_params import RequestOutputKind, SamplingParams
from trivet.runtime.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ suffix | default('') }}"
)
REPLY = "Grüße: ready."
MAX_MODEL_LEN = 256


def make_tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
    """One token per byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    spec = TokenizerSpec(eos_token_ids=[257], eos_token="<|im_end|>", longest_token_bytes=12)
    return Tokenizer(backend, spec, model_vocab_size=258, chat_template=chat_template)


class FakeEngine:
    """`delay_s`: pause before every token. Set `dead` to kill it; `fail` makes the next request end in an error."""

    def __init__(self, *, delay_s: float = 0.0, reply: str = REPLY, chat_template: str | None = TEMPLATE) -> None:
        self.tokenizer = make_tokenizer(chat_template)
        self.model_config: Any = SimpleNamespace(max_model_len=MAX_MODEL_LEN)
        self.manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            trivet_version="0",
            source_dir="/",
            sources=[],
            architecture=Architecture(
                family="fake", name="fake", vocab_size=258, hidden_size=1, num_hidden_layers=1, num_attention_heads=1,
                max_position_embeddings=MAX_MODEL_LEN, weight_formats={}, dtype="float32", num_parameters=0,
            ),
            kv_cache=[],
            tokenizer=self.tokenizer.spec,
            generation=GenerationDefaults(),
            verification=Verification(performed=False),
        )  # fmt: skip
        self.delay_s = delay_s
        self.reply = reply
        self.reset()

    def reset(self) -> None:
        self.dead = False
        self.device = DeviceChoice("cpu")
        self.fail: str | None = None
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.calls: list[dict[str, Any]] = []  # what every request asked for

    def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("killed by the test")

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    @property
    def default_max_tokens(self) -> int | None:
        return None

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def get_stats(self) -> dict[str, Any]:
        return {"num_requests_running": len(self.running)}

    def shutdown(self) -> None:
        return

    async def generate(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.check_health()
        params = sampling_params or SamplingParams()
        name = request_id or "request"
        self.calls.append({"prompt": list(prompt), "params": params, "id": name, "cache_salt": cache_salt})
        ids = self.tokenizer.encode(self.reply, add_special_tokens=False)
        reason = "stop" if len(ids) < (params.max_tokens or 0) else "length"
        ids = ids[: params.max_tokens]
        finished = False
        self.running.add(name)
        try:
            for output in self._outputs(name, list(prompt), ids, reason, params):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                self.check_health()
                finished = output.finished
                yield output
        finally:
            self.running.discard(name)
            if not finished:
                self.aborted.append(name)

    def _outputs(
        self, name: str, prompt: list[int], ids: list[int], reason: str, params: SamplingParams
    ) -> list[RequestOutput]:
        delta = params.output_kind is RequestOutputKind.DELTA
        steps = [[i] for i in ids] if delta else [ids]
        outputs, sent = [], ""
        for position, step in enumerate(steps):
            last = position == len(steps) - 1
            text = self.tokenizer.decode([i for part in steps[: position + 1] for i in part])
            text = text if last else text.rstrip("�")
            for index in range(params.n):
                completion = CompletionOutput(
                    index=index,
                    text=text[len(sent) :],
                    token_ids=step,
                    cumulative_logprob=None,
                    logprobs=[self._position(i, params.logprobs) for i in step]
                    if params.logprobs is not None
                    else None,
                    finish_reason=("error" if self.fail else reason) if last else None,
                )
                done = last and index == params.n - 1
                output = RequestOutput(name, None, prompt, [completion], done, num_cached_tokens=2)
                output.warnings = params.warnings
                output.error = self.fail if last else None
                if params.prompt_logprobs is not None:
                    later = [self._position(i, params.prompt_logprobs) for i in prompt[1:]]
                    output.prompt_logprobs = [None, *later]
                outputs.append(output)
            sent = text if delta else sent
        if not delta and params.n > 1:
            outputs[-1].outputs = [o.outputs[0] for o in outputs]
            return outputs[-1:]
        return outputs

    def _position(self, token_id: int, num_top: int) -> dict[int, Logprob]:
        top = {(token_id + k) % 256: Logprob(-0.5 - k, k + 1, chr(65 + k)) for k in range(1, num_top)}
        return {token_id: Logprob(-0.5, 1, self.tokenizer.decode([token_id], skip_special_tokens=False)), **top}
