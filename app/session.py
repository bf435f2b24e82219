"""The one door to a model for the command line and the chat: in this process, or behind a URL."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.async_llm import AsyncLLM
    from ..runtime.outputs import RequestOutput
    from ..runtime.sampling_params import SamplingParams

T = TypeVar("T")
Message = dict[str, Any]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None  # None = the server does not say

    def as_dict(self) -> dict[str, int | None]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. The last one carries the finish reason, and the usage where it is known."""

    text: str
    finish_reason: str | None = None
    usage: Usage | None = None
    warnings: tuple[str, ...] = ()


class Session(Protocol):
    """A model that answers. Closing an iterator, or an exception in the loop over it, ends that answer."""

    @property
    def model_name(self) -> str: ...

    @property
    def has_chat_template(self) -> bool: ...

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Generator[Delta, None, None]:
        """Answer a conversation. `options`: SamplingParams fields that the user set, by name."""
        ...

    def complete(self, prompt: str, options: Mapping[str, Any]) -> Generator[Delta, None, None]:
        """Continue a text."""
        ...

    def close(self) -> None: ...


class LocalSession:
    """A model in this process. Its engine runs on a thread of its own, so ^C never cuts into a step."""

    def __init__(self, engine: AsyncLLM, *, model_name: str, chat_template_kwargs: Mapping[str, Any]) -> None:
        self._engine = engine
        self._chat_template_kwargs = chat_template_kwargs
        self._runner = asyncio.Runner()
        # Python handles a signal in the main thread, but the system may give it to any: then the loop, which waits,
        # learns of it through this pair of sockets only.
        self._wakeup, self._signals = socket.socketpair()
        self._wakeup.setblocking(False)
        self._signals.setblocking(False)
        self._runner.get_loop().add_reader(self._wakeup, self._wakeup.recv, 4096)
        self.model_name = model_name

    @property
    def has_chat_template(self) -> bool:
        return self._engine.get_tokenizer().chat_template is not None

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Generator[Delta, None, None]:
        tokenizer = self._engine.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, **self._chat_template_kwargs)
        yield from self._generate(text, options, add_special_tokens=False)

    def complete(self, prompt: str, options: Mapping[str, Any]) -> Generator[Delta, None, None]:
        yield from self._generate(prompt, options, add_special_tokens=True)

    def _generate(
        self, text: str, options: Mapping[str, Any], *, add_special_tokens: bool
    ) -> Generator[Delta, None, None]:
        outputs = self._engine.generate(text, self._params(options), add_special_tokens=add_special_tokens)
        num_tokens, warned = 0, False
        try:
            while True:
                try:
                    output = self._run(_next(outputs))
                except StopAsyncIteration:
                    return
                num_tokens += len(output.outputs[0].token_ids)
                yield _delta(output, num_tokens, with_warnings=not warned)
                warned = True
                if output.finished:
                    return
        finally:
            self._run(outputs.aclose())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result. In the main thread, the only one that may ask for it, signals wake the loop."""
        if threading.current_thread() is not threading.main_thread():
            return self._runner.run(coroutine)
        previous = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        try:
            return self._runner.run(coroutine)
        finally:
            signal.set_wakeup_fd(previous)

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        from ..runtime.sampling_params import RequestOutputKind, SamplingParams

        defaults = self._engine.get_default_sampling_params()
        values = {
            name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        }
        values["max_tokens"] = self._engine.default_max_tokens  # None = up to the context
        return SamplingParams(**values | dict(options), output_kind=RequestOutputKind.DELTA)

    def close(self) -> None:
        self._engine.shutdown()
        with suppress(RuntimeError):
            self._runner.close()
        self._wakeup.close()
        self._signals.close()


async def _next(outputs: Any) -> RequestOutput:
    output: RequestOutput = await anext(outputs)
    return output


def _delta(output: RequestOutput, num_tokens: int, *, with_warnings: bool) -> Delta:
    from ..runtime.errors import TrivetError

    choice = output.outputs[0]
    if output.error is not None:
        raise TrivetError(f"the answer failed: {output.error}")
    usage = Usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens) if choice.finished else None
    warnings = tuple(output.warnings) if with_warnings else ()
    return Delta(choice.text, choice.finish_reason, usage, warnings)


def load_engine(
    model: str,
    engine_options: Mapping[str, Any],
    *,
    serving: bool = False,
    download_progress: Callable[[str, int, int | None], None] | None = None,
    export_progress: Callable[[str, float], None] | None = None,
) -> AsyncLLM:
    """Find (and fetch) the model, make its package if there is none, and start an engine.

    Options that are wrong are refused before anything is fetched. Raises TrivetError and ExportError.
    """
    from ..runtime.interrupts import import_native_modules

    import_native_modules("numpy")
    from .. import AsyncLLM
    from ..runtime.config import EngineConfig, UsageContext
    from ..runtime.model_loader import resolve_package
    from ..runtime.model_store import resolve

    context = UsageContext.OPENAI_API_SERVER if serving else UsageContext.CLI
    config = EngineConfig.from_kwargs(model=model, usage_context=context, **engine_options)
    config.device_config.choose()  # a GPU that is required and missing is said before anything is fetched
    checkpoint = resolve(model, progress=download_progress)
    import_native_modules("onnxruntime", "tokenizers")

    def report_export(stage: str, fraction: float) -> None:
        import_native_modules("onnx")  # only exports need it; the first report comes before they do
        if export_progress is not None:
            export_progress(stage, fraction)

    # Exported here for the progress; the engine finds it again by `model`, whose name may bring sampling defaults.
    resolve_package(str(checkpoint), config.load_config, progress=report_export)
    return AsyncLLM.from_engine_config(config)


def display_name(model: str) -> str:
    """A model's name for people: the reference as typed, or the file or folder of a path."""
    path = Path(model)
    return path.resolve().stem if path.suffix == ".gguf" else path.name if path.exists() else model
