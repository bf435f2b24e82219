"""RequestOutputCollector: the mailbox between the output processor and one consumer of AsyncLLM.generate."""

from __future__ import annotations

import asyncio

from ..outputs import CompletionOutput, RequestOutput
from ..sampling_params import RequestOutputKind


class RequestOutputCollector:
    """Holds at most one RequestOutput; what arrives while the consumer is slow is merged into it.

    All calls come from the consumer's event loop.
    """

    __slots__ = ("_event", "_is_delta", "_pending")

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._is_delta = output_kind is RequestOutputKind.DELTA
        self._pending: RequestOutput | BaseException | None = None
        self._event = asyncio.Event()

    def put(self, output: RequestOutput | BaseException) -> None:
        """Never blocks. An exception replaces whatever is pending."""
        if isinstance(self._pending, RequestOutput) and isinstance(output, RequestOutput):
            merge_outputs(self._pending, output, is_delta=self._is_delta)
            return
        if isinstance(self._pending, BaseException):
            return
        self._pending = output
        self._event.set()

    async def get(self) -> RequestOutput:
        """The pending output, or the next one. Raises what was put as an exception."""
        while (output := self.get_nowait()) is None:
            await self._event.wait()
        return output

    def get_nowait(self) -> RequestOutput | None:
        output = self._pending
        if isinstance(output, BaseException):
            raise output
        self._pending = None
        self._event.clear()
        return output


def merge_outputs(earlier: RequestOutput, later: RequestOutput, *, is_delta: bool) -> None:
    """Fold `later` into `earlier`: deltas are joined per completion index, anything else is replaced."""
    earlier.finished |= later.finished
    earlier.metrics = later.metrics
    earlier.error = later.error or earlier.error
    earlier.num_cached_tokens = later.num_cached_tokens
    if later.prompt_logprobs is not None:
        earlier.prompt_logprobs = later.prompt_logprobs
    by_index = {completion.index: position for position, completion in enumerate(earlier.outputs)}
    for completion in later.outputs:
        position = by_index.get(completion.index)
        if position is None:
            earlier.outputs.append(completion)
        elif is_delta:
            _join(earlier.outputs[position], completion)
        else:
            earlier.outputs[position] = completion


def _join(earlier: CompletionOutput, later: CompletionOutput) -> None:
    earlier.text += later.text
    earlier.token_ids += later.token_ids
    if later.logprobs:
        earlier.logprobs = (earlier.logprobs or []) + later.logprobs
    earlier.cumulative_logprob = later.cumulative_logprob
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason
