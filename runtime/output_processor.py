"""Core outputs -> RequestOutputs: text, stop strings, logprobs, and the n completions of a request put together."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from .errors import InvalidRequestError
from .outputs import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from .request import EngineCoreEventType
from .sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from .engine.collector import RequestOutputCollector  # imports asyncio
    from .engine.messages import EngineCoreRequest
    from .request import EngineCoreEvent
    from .scheduler.output import EngineCoreOutput, TokenLogprobs
    from .tokenizer import IncrementalDetokenizer, Tokenizer


class ProcessedOutputs(msgspec.Struct):
    """Outputs for callers without a collector, and requests that the core must stop (a stop string matched)."""

    request_outputs: list[RequestOutput] = []
    abort_request_ids: list[str] = []


class ParentRequest:
    """What the n sequences of a caller's request share. n = 1 is the same with one child."""

    __slots__ = ("children", "collector", "final", "metrics", "params", "prompt", "prompt_token_ids", "request_id")

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
        collector: RequestOutputCollector | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.collector = collector
        self.metrics = RequestMetrics(arrival_time)
        self.children: set[str] = set()  # ids of unfinished sequences
        self.final: list[CompletionOutput] = []  # finished completions, kept under FINAL_ONLY

    def collect(self, completion: CompletionOutput) -> list[CompletionOutput] | None:
        """What to tell the caller now; None = nothing yet."""
        if self.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            return [completion]
        self.final.append(completion)
        if self.children:
            return None
        return sorted(self.final, key=lambda c: c.index)


class RequestState:
    """One sequence: its tokens, text and logprobs so far."""

    __slots__ = (
        "cumulative_logprob",
        "detokenizer",
        "index",
        "logprobs",
        "num_cached_tokens",
        "num_sent",
        "parent",
        "prompt_logprobs",
        "request_id",
        "token_ids",
    )

    def __init__(
        self, request_id: str, index: int, parent: ParentRequest, detokenizer: IncrementalDetokenizer | None
    ) -> None:
        params = parent.params
        self.request_id = request_id
        self.index = index
        self.parent = parent
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.num_sent = 0  # tokens already sent, under DELTA
        self.num_cached_tokens = 0
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None if params.prompt_logprobs is None else [None]

    def take_prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """For the next output; under DELTA only its first one carries them."""
        prompt_logprobs = self.prompt_logprobs
        if self.parent.params.output_kind is RequestOutputKind.DELTA:
            self.prompt_logprobs = None
        return prompt_logprobs

    def completion(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> CompletionOutput:
        """The CompletionOutput of now, by the output kind; marks its tokens as sent."""
        delta = self.parent.params.output_kind is RequestOutputKind.DELTA
        start = self.num_sent if delta else 0
        self.num_sent = len(self.token_ids)
        finished = finish_reason is not None
        text = "" if self.detokenizer is None else self.detokenizer.get_next_output_text(finished, delta)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[start:],
            finish_reason=None if finish_reason is None else finish_reason.value,
            stop_reason=stop_reason,
        )


class OutputProcessor:
    """Not thread-safe: one thread (the caller's, or the event loop's) owns it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}
        self._parents: dict[str, ParentRequest] = {}
        self._decoded: dict[int, str] = {}

    @property
    def num_unfinished_requests(self) -> int:
        """Requests of callers; one with n completions counts once."""
        return len(self._parents)

    def has_request(self, request_id: str) -> bool:
        return request_id in self._parents

    def delivers_to(self, collector: RequestOutputCollector, request_id: str) -> bool:
        """Whether the unfinished request of this id is the collector's."""
        parent = self._parents.get(request_id)
        return parent is not None and parent.collector is collector

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        children: list[EngineCoreRequest],
        params: SamplingParams,
        collector: RequestOutputCollector | None = None,
    ) -> None:
        """Register a request and its n sequences. InvalidRequestError if the id is in use."""
        if request_id in self._parents:
            raise InvalidRequestError(f"request id {request_id!r} is in use by an unfinished request: choose another")
        first = children[0]
        parent = ParentRequest(request_id, prompt, first.prompt_token_ids, params, first.arrival_time, collector)
        self._parents[request_id] = parent
        for index, child in enumerate(children):
            parent.children.add(child.request_id)
            self._states[child.request_id] = RequestState(
                child.request_id, index, parent, self._detokenizer(child.prompt_token_ids, params)
            )

    def _detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer | None:
        if not params.detokenize:
            return None
        from .tokenizer import IncrementalDetokenizer

        return IncrementalDetokenizer(
            self._tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def process_outputs(self, core_outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Advance every request of a step. Outputs of requests that are gone (aborted) are dropped."""
        processed = ProcessedOutputs()
        for core_output in core_outputs:
            state = self._states.get(core_output.request_id)
            if state is None:
                continue
            self._record(state, core_output)
            finish_reason, stop_reason = core_output.finish_reason, core_output.stop_reason
            if state.detokenizer is not None:
                matched = state.detokenizer.update(core_output.new_token_ids, finish_reason is FinishReason.STOP)
                if matched is not None:
                    if finish_reason is None:
                        processed.abort_request_ids.append(state.request_id)
                    finish_reason, stop_reason = FinishReason.STOP, matched
            self._emit(state, finish_reason, stop_reason, core_output.error, processed)
        return processed

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests (callers' ids; unknown ones are ignored) and end their collectors with "abort".

        Returns the core's ids of the sequences to stop.
        """
        core_ids: list[str] = []
        for request_id in request_ids:
            parent = self._parents.get(request_id)
            if parent is None:
                continue
            for child_id in sorted(parent.children):
                core_ids.append(child_id)
                self._emit(self._states[child_id], FinishReason.ABORT, None, None, ProcessedOutputs())
        return core_ids

    def unfinished_request_ids(self) -> list[str]:
        return list(self._parents)

    def fail_all(self, error: BaseException) -> None:
        """The engine died: every waiting consumer gets `error`."""
        for parent in self._parents.values():
            if parent.collector is not None:
                parent.collector.put(error)
        self._parents.clear()
        self._states.clear()

    # --- one request ----------------------------------------------------------------------------------------------
    def _record(self, state: RequestState, core_output: EngineCoreOutput) -> None:
        metrics, now = state.parent.metrics, time.monotonic()
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = _first_scheduled(core_output.events)
        if core_output.new_token_ids:
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
        state.num_cached_tokens = core_output.num_cached_tokens
        state.token_ids += core_output.new_token_ids
        if state.prompt_logprobs is not None:
            state.prompt_logprobs += [self._position(t) for t in core_output.new_prompt_logprobs or ()]
        if state.logprobs is not None:
            for token in core_output.new_logprobs or ():
                state.logprobs.append(self._position(token))
                state.cumulative_logprob = (state.cumulative_logprob or 0.0) + token.logprob

    def _emit(
        self,
        state: RequestState,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        error: str | None,
        processed: ProcessedOutputs,
    ) -> None:
        parent = state.parent
        if finish_reason is not None:
            del self._states[state.request_id]
            parent.children.discard(state.request_id)
            if not parent.children:
                del self._parents[parent.request_id]
        elif parent.params.output_kind is RequestOutputKind.FINAL_ONLY or state.num_sent == len(state.token_ids):
            return
        completions = parent.collect(state.completion(finish_reason, stop_reason))
        if completions is None:
            return
        output = RequestOutput(
            request_id=parent.request_id,
            prompt=parent.prompt,
            prompt_token_ids=parent.prompt_token_ids,
            outputs=completions,
            finished=not parent.children,
            prompt_logprobs=state.take_prompt_logprobs(),
            num_cached_tokens=state.num_cached_tokens,
            metrics=parent.metrics,
            error=error,
            warnings=parent.params.warnings,
        )
        if parent.collector is not None:
            parent.collector.put(output)
        else:
            processed.request_outputs.append(output)

    def _position(self, token: TokenLogprobs) -> PositionLogprobs:
        position = {token.token_id: Logprob(token.logprob, token.rank, self._decode(token.token_id))}
        for index, (token_id, logprob) in enumerate(zip(token.top_token_ids, token.top_logprobs, strict=True)):
            if token_id not in position:
                position[token_id] = Logprob(logprob, index + 1, self._decode(token_id))
        return position

    def _decode(self, token_id: int) -> str:
        text = self._decoded.get(token_id)
        if text is None:
            text = self._decoded[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def _first_scheduled(events: Iterable[EngineCoreEvent]) -> float | None:
    return next((e.timestamp for e in events if e.type is EngineCoreEventType.SCHEDULED), None)
