"""The model in this process: opening it, prompts in its tokens, and records of its outputs."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..cli import console, options
from ..cli.errors import CliError
from ..cli.loading import ExportNotes
from .datasets import SampleRequest, TokenIdPrompts
from .metrics import RequestRecord

if TYPE_CHECKING:
    from ...runtime.config import EngineConfig
    from ...runtime.llm import LLM
    from ...runtime.outputs import RequestOutput
    from ...runtime.sampling_params import SamplingParams
    from ...runtime.tokenizer import Tokenizer


def engine_config(args: Namespace, **defaults: Any) -> EngineConfig:
    """The configuration that the flags ask for, over `defaults`, with the model fetched and its package made."""
    from ...runtime.config import EngineConfig
    from ...runtime.model_loader import resolve_package
    from ...runtime.model_store import resolve

    model, kwargs = options.chosen_model(args), {**defaults, **options.engine_options(args)}
    config = EngineConfig.from_kwargs(model=model, **kwargs)  # wrong options are refused before anything is fetched
    bar = console.ProgressBar()
    try:
        checkpoint = resolve(model, progress=bar)
        package, _ = resolve_package(str(checkpoint), config.load_config, progress=ExportNotes(bar))
    finally:
        bar.close()
    return EngineConfig.from_kwargs(model=str(package), **kwargs)


def prompt_maker(tokenizer: Tokenizer) -> TokenIdPrompts:
    return TokenIdPrompts(tokenizer.vocab_size, tokenizer.encode, lambda ids: tokenizer.decode(ids))


def sampling_params(args: Namespace, output_len: int, *, delta: bool = False) -> SamplingParams:
    """Greedy, and exactly output_len tokens."""
    from ...runtime.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind.DELTA if delta else RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=not args.disable_detokenize,
        output_kind=kind,
    )  # fmt: skip


def prompts_of(requests: Sequence[SampleRequest]) -> list[list[int]]:
    return [request.token_ids for request in requests if request.token_ids is not None]


def check_lengths(requests: Iterable[SampleRequest], llm_max_model_len: int) -> None:
    """CliError for a request that does not fit the context, before anything is measured."""
    for request in requests:
        total = (request.prompt_len or 0) + request.expected_output_len
        if total > llm_max_model_len:
            raise CliError(
                f"a request of {request.prompt_len} prompt tokens and {request.expected_output_len} output tokens does "
                f"not fit the context of {llm_max_model_len} (--max-model-len); ask for shorter ones"
            )


def to_perf_counter(monotonic: float) -> float:
    """A time of the engine (time.monotonic) on the clock of the records."""
    return monotonic + (time.perf_counter() - time.monotonic())


def record_of(output: RequestOutput, started: float) -> RequestRecord:
    """A finished request as it was, seen from the moment (perf_counter) at which the caller handed it over."""
    metrics = output.metrics
    if metrics is None or metrics.first_token_time is None or metrics.last_token_time is None:
        raise CliError(f"request {output.request_id} came back without times: {output.error or 'no token'}")
    return RequestRecord(
        prompt_tokens=len(output.prompt_token_ids),
        start=started,
        ttft=to_perf_counter(metrics.first_token_time) - started,
        latency=to_perf_counter(metrics.last_token_time) - started,
        completion_tokens=sum(len(choice.token_ids) for choice in output.outputs),
        cached_tokens=output.num_cached_tokens,
        text=output.outputs[0].text,
        error=output.error,
    )


def warm_up(llm: LLM, requests: Sequence[SampleRequest], args: Namespace) -> None:
    params = [sampling_params(args, request.expected_output_len) for request in requests]
    if requests:
        llm.generate(prompts_of(requests), params)


class Progress:
    """A bar on a terminal, `title` alone elsewhere."""

    def __init__(self, title: str, total: int, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._bar = console.ProgressBar()
        self._done = 0
        self._started = time.monotonic()
        self.update(0)

    def update(self, count: int = 1) -> None:
        self.show(self._done + count)

    def show(self, done: int) -> None:
        self._done = done
        seconds = time.monotonic() - self._started
        left = f", {seconds / done * (self._total - done):.0f} s left" if 0 < done < self._total else ""
        stage = f"{done}/{self._total} {self._unit}{left}"
        self._bar.show_fraction(self._title, stage, min(1.0, done / max(1, self._total)))

    def close(self) -> None:
        self._bar.close()
