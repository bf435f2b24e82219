"""AsyncLLM: many concurrent requests from an asyncio program. The engine runs on its own thread."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Self

from .config import EngineConfig
from .engine.builder import build_engine, stats_dict
from .engine.collector import RequestOutputCollector
from .engine.core_client import OutputQueue, ThreadedClient
from .errors import EngineDeadError, InvalidRequestError
from .output_processor import OutputProcessor

if TYPE_CHECKING:
    import os

    from ..backends.contract.manifest import Manifest
    from ..backends.devices import DeviceChoice
    from .config import ModelConfig
    from .engine.core import EngineCore
    from .engine.input_processor import Prompt
    from .outputs import RequestOutput
    from .sampling_params import SamplingParams
    from .scheduler.output import EngineCoreOutputs
    from .tokenizer import Tokenizer


class AsyncLLM:
    """One engine. All coroutines of an instance run on one event loop at a time."""

    def __init__(self, model: str | os.PathLike[str], **engine_kwargs: Any) -> None:
        """`model`: a checkpoint, a package folder or a reference (see `trivet pull`).

        Raises ConfigError for an option that is not honoured, ModelLoadError for a model that cannot be loaded.
        """
        self._start(EngineConfig.from_kwargs(model=model, **engine_kwargs))

    @classmethod
    def from_engine_config(cls, config: EngineConfig) -> Self:
        engine = cls.__new__(cls)
        engine._start(config)
        return engine

    def _start(self, config: EngineConfig) -> None:
        parts = build_engine(config)
        self.config = parts.config
        self.manifest: Manifest = parts.manifest
        self._parts = parts
        self._output_processor = OutputProcessor(parts.tokenizer)
        self._output_queue = OutputQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client = ThreadedClient(parts.core, self._output_queue)
        # Also at interpreter exit: the thread must not be inside the model when the process goes away.
        self._finalizer = weakref.finalize(self, self._client.shutdown)

    # --- requests -------------------------------------------------------------------------------------------------
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come, by `sampling_params.output_kind`; a slow consumer gets merged ones.

        Leaving the loop, closing the generator or cancelling its task aborts the request. Raises InvalidRequestError
        before anything is queued, EngineDeadError whenever the engine stops.
        """
        collector, request_id = self._add_request(
            prompt, sampling_params, request_id, priority, cache_salt, add_special_tokens
        )
        finished = False
        try:
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        finally:
            # The id may be another request's by now: this one aborted, its generator closed late.
            if self._output_processor.delivers_to(collector, request_id):
                self.abort(request_id)

    def _add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        add_special_tokens: bool,
    ) -> tuple[RequestOutputCollector, str]:
        self.check_health()
        self._bind_loop()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        request_id = uuid.uuid4().hex if request_id is None else request_id
        text, children = self._parts.input_processor.process(
            request_id,
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
        )
        collector = RequestOutputCollector(params.output_kind)
        self._output_processor.add_request(request_id, text, children, params, collector)
        for child in children:
            self._client.add_request(child)
        return collector, request_id

    def _bind_loop(self) -> None:
        """Deliver outputs on the running loop. What an earlier, closed loop left behind is aborted."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            self._output_queue.wake()
            return
        if self._loop is not None and not self._loop.is_closed() and self._output_processor.num_unfinished_requests:
            raise InvalidRequestError(
                "this AsyncLLM has unfinished requests on another event loop: use it from one loop at a time"
            )
        self.abort(self._output_processor.unfinished_request_ids())
        self._loop = loop
        self._output_queue.bind(loop, self._process)

    def _process(self, item: EngineCoreOutputs | EngineDeadError) -> None:
        if isinstance(item, EngineDeadError):
            self._output_processor.fail_all(item)
            return
        processed = self._output_processor.process_outputs(item.outputs)
        if processed.abort_request_ids:
            self._client.abort_requests(processed.abort_request_ids)

    def abort(self, request_id: str | list[str]) -> None:
        """End requests; their consumers get a last output with finish_reason "abort". Unknown ids are passed over."""
        request_ids = [request_id] if isinstance(request_id, str) else request_id
        core_ids = self._output_processor.abort_requests(request_ids)
        if core_ids:
            self._client.abort_requests(core_ids)

    # --- state ----------------------------------------------------------------------------------------------------
    @property
    def is_running(self) -> bool:
        return self._client.is_alive and not self.errored

    @property
    def errored(self) -> bool:
        return self._client.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why no request is served any more; None while the engine is well."""
        return self._client.dead_error

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine has stopped."""
        if (error := self.dead_error) is not None:
            raise error

    @property
    def device(self) -> DeviceChoice:
        """Where the model runs, and why it is not where it was to run."""
        return self.config.resolved_device

    def get_stats(self) -> dict[str, int | float]:
        """Gauges and counters after the last step; does not wait for the engine."""
        return stats_dict(self._client.stats)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; waits for the current step. False: requests are running, nothing was done."""

        def reset(core: EngineCore) -> bool:
            return core.reset_prefix_cache()

        self.check_health()
        return bool(self._client.call(reset))

    def get_tokenizer(self) -> Tokenizer:
        return self._parts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """A fresh SamplingParams with the model's own defaults (generation_config="vllm": the library's)."""
        return self._parts.default_sampling_params()

    @property
    def default_max_tokens(self) -> int | None:
        """The model's own default for the length of an answer; None = it has none, where SamplingParams has 16."""
        return self._parts.default_max_tokens

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model_config

    # --- end ------------------------------------------------------------------------------------------------------
    def shutdown(self, *, drain: bool = False) -> None:
        """Stop the engine and free the model; unfinished requests are aborted, or completed first (drain). Idempotent.

        Blocks until the current step ends, which on the CPU is cut short without drain. Call it on the event loop's
        thread; with drain on any other one, because the loop has to consume the outputs meanwhile.
        """
        if not drain and self._loop is not None and not self._loop.is_closed():
            self.abort(self._output_processor.unfinished_request_ids())
        self._client.shutdown(drain=drain)
        self._finalizer.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.shutdown()
