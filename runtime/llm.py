"""LLM: batches of prompts in, completions out, in the caller's thread."""

from __future__ import annotations

import importlib
import itertools
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

from .config import EngineConfig
from .engine.builder import build_engine, stats_dict
from .engine.core_client import InprocClient
from .errors import InvalidRequestError
from .interrupts import uninterrupted
from .output_processor import OutputProcessor
from .sampling_params import RequestOutputKind, SamplingParams, require_sampling_params

if TYPE_CHECKING:
    import os

    from ..backends.contract.manifest import Manifest
    from ..backends.devices import DeviceChoice
    from .config import ModelConfig
    from .engine.input_processor import Prompt
    from .outputs import RequestOutput
    from .tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """One engine, used by one thread at a time. `with LLM(...) as llm:` frees it at the end."""

    def __init__(self, model: str | os.PathLike[str], **engine_kwargs: Any) -> None:
        """`model`: a checkpoint, a package folder or a reference (see `trivet pull`).

        Raises ConfigError for an option that is not honoured, ModelLoadError for a model that cannot be loaded.
        """
        self._start(EngineConfig.from_kwargs(model=model, **engine_kwargs))

    @classmethod
    def from_engine_config(cls, config: EngineConfig) -> Self:
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self._parts = build_engine(config)
        self.config = self._parts.config
        self.manifest: Manifest = self._parts.manifest
        self._output_processor = OutputProcessor(self._parts.tokenizer)
        self._client = InprocClient(self._parts.core)
        self._request_ids = itertools.count()
        self._in_use = threading.Lock()
        self._finalizer = weakref.finalize(self, self._client.shutdown)

    # --- generation -----------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts. None = the model's own sampling defaults.

        A request that is refused (InvalidRequestError) or an interrupt (KeyboardInterrupt) ends the whole call and
        leaves the engine ready for the next one; what a signal handler of the program raises within a step ends it.
        """
        return self._run(_as_list(prompts), sampling_params, priority, use_tqdm=use_tqdm, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them. The template writes the special tokens, so none are added."""
        conversations = _conversations(messages)
        prompts: list[Prompt] = [
            self._parts.tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, None, use_tqdm=use_tqdm, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Generator[RequestOutput, None, None]:
        """Deltas of one prompt as they come. Closing the iterator aborts the request."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        require_sampling_params(params)
        params = params.clone(output_kind=RequestOutputKind.DELTA)
        with self._sole_use():
            request_id = self._add_request(prompt, params, 0, add_special_tokens)
            try:
                while self._output_processor.has_request(request_id):
                    with uninterrupted():
                        outputs = self._step()
                    yield from outputs
            finally:
                self._abort([request_id])

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        *,
        use_tqdm: bool,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        all_params = self._params_per_prompt(sampling_params, len(prompts))
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts but {len(priorities)} priorities")
        request_ids: list[str] = []
        with self._sole_use():
            try:
                for prompt, params, rank in zip(prompts, all_params, priorities, strict=True):
                    params = params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
                    request_ids.append(self._add_request(prompt, params, rank, add_special_tokens))
                finished = self._run_to_end(len(request_ids), use_tqdm=use_tqdm)
            finally:
                self._abort(request_ids)
        return [finished[request_id] for request_id in request_ids]

    @contextmanager
    def _sole_use(self) -> Iterator[None]:
        """InvalidRequestError unless nobody else is in such a block: a step's outputs go to whoever runs it."""
        claimed = False
        try:
            with uninterrupted():
                claimed = self._in_use.acquire(blocking=False)
            if not claimed:
                raise InvalidRequestError("this LLM is in use by a stream or another thread: finish that first")
            yield
        finally:
            if claimed:
                self._in_use.release()

    def _run_to_end(self, num_requests: int, *, use_tqdm: bool) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        progress = _progress_bar(num_requests) if use_tqdm else None
        try:
            while len(finished) < num_requests:
                with uninterrupted():
                    outputs = self._step()
                for output in outputs:
                    finished[output.request_id] = output
                if progress is not None and outputs:
                    progress.update(len(outputs))
        finally:
            if progress is not None:
                progress.close()
        return finished

    def _params_per_prompt(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        many = isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str)
        given: list[Any] = list(sampling_params) if many else [sampling_params]
        for params in given:
            require_sampling_params(params)
        if len(given) != count:
            raise InvalidRequestError(f"{count} prompts but {len(given)} sampling_params")
        return given

    def _add_request(self, prompt: Prompt, params: SamplingParams, priority: int, add_special_tokens: bool) -> str:
        request_id = str(next(self._request_ids))
        text, children = self._parts.input_processor.process(
            request_id, prompt, params, priority=priority, add_special_tokens=add_special_tokens
        )
        with uninterrupted():
            self._output_processor.add_request(request_id, text, children, params)
            for child in children:
                self._client.add_request(child)
        return request_id

    def _step(self) -> list[RequestOutput]:
        processed = self._output_processor.process_outputs(self._client.get_outputs().outputs)
        if processed.abort_request_ids:
            self._client.abort_requests(processed.abort_request_ids)
        return processed.request_outputs

    def _abort(self, request_ids: Sequence[str]) -> None:
        """End what is unfinished; also lets the runner forget what has ended."""
        with uninterrupted():
            if core_ids := self._output_processor.abort_requests(request_ids):
                self._client.abort_requests(core_ids)
            self._client.finish_step()

    # --- state ----------------------------------------------------------------------------------------------------
    def get_tokenizer(self) -> Tokenizer:
        return self._parts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """A fresh SamplingParams with the model's own defaults (generation_config="vllm": the library's)."""
        return self._parts.default_sampling_params()

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model_config

    @property
    def device(self) -> DeviceChoice:
        """Where the model runs, and why it is not where it was to run."""
        return self.config.resolved_device

    def get_stats(self) -> dict[str, int | float]:
        """Gauges and counters after the last step."""
        return stats_dict(self._client.stats)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False: a stream is under way, nothing was done."""
        return self._client.reset_prefix_cache()

    # --- end ------------------------------------------------------------------------------------------------------
    def shutdown(self) -> None:
        """Free the model. Idempotent; every later call raises EngineDeadError."""
        self._client.shutdown()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation as a list of one."""
    if not messages or isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; a non-empty list of integers is one prompt."""
    if isinstance(prompts, Sequence) and not isinstance(prompts, str) and not (prompts and isinstance(prompts[0], int)):
        return list(cast("Sequence[Prompt]", prompts))
    return [cast("Prompt", prompts)]


def _progress_bar(total: int) -> Any:
    try:
        tqdm = importlib.import_module("tqdm.auto")
    except ImportError as exc:
        raise InvalidRequestError("use_tqdm needs the package tqdm: pip install tqdm, or leave it out") from exc
    return tqdm.tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)
