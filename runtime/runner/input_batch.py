"""Scheduled requests -> graph inputs (backends/contract/opset.py), in NumPy buffers that are reused step after step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...backends.contract.opset import SAMPLING_FLOATS, SAMPLING_INTS
from .sampling_state import NO_TOKEN_LEFT, ROW_LISTS, SamplingState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..request import Request
    from ..scheduler.output import ScheduledRequest, SchedulerOutput

_OFFSET = SAMPLING_INTS.index("offset")
_NUM_LOGPROBS = SAMPLING_INTS.index("num_logprobs")
_FORCED = SAMPLING_INTS.index("forced_token_id")
_NUM_PROMPT = SAMPLING_INTS.index("num_prompt_tokens")


class SampleRow(NamedTuple):
    """What row s of the logits is for."""

    request_id: str
    num_logprobs: int  # -1 = none wanted
    is_prompt: bool  # a prompt position whose next token is known: prompt_logprobs


class BatchInputs(NamedTuple):
    """Inputs of one Run; the arrays are views of reused buffers, valid until the next build (which may reuse them)."""

    arrays: dict[str, NDArray[Any]]
    rows: list[SampleRow]
    wants_logprobs: bool
    errors: dict[str, str]  # requests that no token can be drawn for; the token of their row means nothing


class _DecodeStep(NamedTuple):
    """A step of one token per request that the next one may repeat, with other tokens only."""

    requests: list[Request]
    states: list[_RequestState]
    inputs: BatchInputs


class _RequestState:
    """What the batch keeps of a request while it runs."""

    __slots__ = ("block_row", "num_blocks", "sampling")

    def __init__(self, scheduled: ScheduledRequest, max_blocks: int, vocab_size: int) -> None:
        self.block_row: NDArray[np.int32] = np.zeros(max_blocks, np.int32)
        self.num_blocks = 0
        self.sampling = SamplingState(scheduled.request, vocab_size)

    def update_blocks(self, block_ids: list[int]) -> None:
        """A block table only grows while its request runs."""
        known = self.num_blocks
        if len(block_ids) > known:
            self.block_row[known : len(block_ids)] = block_ids[known:]
            self.num_blocks = len(block_ids)


class _Growable:
    """A one-dimensional buffer that grows by doubling and is filled from the front each step."""

    __slots__ = ("data", "size")

    def __init__(self, dtype: type[np.generic]) -> None:
        self.data: NDArray[Any] = np.zeros(64, dtype)
        self.size = 0

    def append(self, values: NDArray[Any]) -> None:
        end = self.size + len(values)
        if end > len(self.data):
            grown = np.zeros(max(end, 2 * len(self.data)), self.data.dtype)
            grown[: self.size] = self.data[: self.size]
            self.data = grown
        self.data[self.size : end] = values
        self.size = end


class InputBatch:
    """Builds the inputs of a step. Knows shapes only: tokens, blocks, rows.

    max_num_batched_tokens, max_num_seqs: the scheduler's limits. max_model_len, block_size: tokens.
    """

    def __init__(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_blocks = -(-max_model_len // block_size)
        self.states: dict[str, _RequestState] = {}
        self.input_ids = np.zeros(max_num_batched_tokens, np.int32)
        self.positions = np.zeros(max_num_batched_tokens, np.int32)
        self.slot_mapping = np.zeros(max_num_batched_tokens, np.int32)
        self.block_table = np.zeros(max_num_seqs * self.max_blocks, np.int32)
        self._block_table = self.block_table[:0].reshape(0, 0)  # as the last step had it
        self.query_start_loc = np.zeros(max_num_seqs + 1, np.int32)
        self.seq_lens = np.zeros(max_num_seqs, np.int32)
        self.arange = np.arange(max_model_len, dtype=np.int32)
        self.lists = {name: _Growable(dtype) for name, dtype in ROW_LISTS.items()}
        self._reserve_rows(max_num_seqs)
        self.bitmask = np.zeros((0, 0), np.int32)
        self.max_num_logprobs = np.zeros((), np.int32)
        self._decode_step: _DecodeStep | None = None  # the last step, if it was one
        self._views: dict[str, tuple[NDArray[Any], int, NDArray[Any]]] = {}  # name -> buffer, rows, its front

    def _reserve_rows(self, num_rows: int) -> None:
        self.sampling_floats = np.zeros((num_rows, len(SAMPLING_FLOATS)), np.float32)
        self.sampling_ints = np.zeros((num_rows, len(SAMPLING_INTS)), np.int64)
        self.logits_indices = np.zeros(num_rows, np.int32)
        self.locs = {name: np.zeros(num_rows + 1, np.int32) for name in _LOC_OF_LIST.values()}

    def forget(self, output: SchedulerOutput) -> None:
        """Drop the state of requests that finished or lost their blocks."""
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self.states.pop(request_id, None)
            self._decode_step = None

    def build(self, output: SchedulerOutput) -> BatchInputs:
        """Inputs of a step that schedules at least one token."""
        if self._decode_step is not None and self._repeats(output.scheduled, self._decode_step):
            return self._repeat(output.scheduled, self._decode_step)
        inputs = self._build(output)
        self._decode_step = self._as_decode_step(output.scheduled, inputs)
        return inputs

    def _as_decode_step(self, scheduled: list[ScheduledRequest], inputs: BatchInputs) -> _DecodeStep | None:
        if inputs.errors or not len(inputs.rows) == len(scheduled) == len(inputs.arrays["input_ids"]):
            return None
        states = [self.states[s.request.request_id] for s in scheduled]
        if any(row.is_prompt for row in inputs.rows) or any(state.sampling.has_lists for state in states):
            return None
        return _DecodeStep([s.request for s in scheduled], states, inputs)

    def _repeats(self, scheduled: list[ScheduledRequest], last: _DecodeStep) -> bool:
        """Whether the same requests are scheduled for one token each, and none has a new KV block."""
        return len(scheduled) == len(last.requests) and all(
            item.request is request and item.num_scheduled_tokens == 1 and len(item.block_ids) == state.num_blocks
            for item, request, state in zip(scheduled, last.requests, last.states, strict=True)
        )

    def _repeat(self, scheduled: list[ScheduledRequest], last: _DecodeStep) -> BatchInputs:
        """The last step's arrays with what changes from token to token. (The host's part of most steps.)"""
        for index, item in enumerate(scheduled):
            first = item.num_computed_tokens
            self.input_ids[index] = item.request.token_ids_np[first]
            self._place_tokens(last.states[index], index, first, 1)
            self.seq_lens[index] = first + 1
            self.sampling_ints[index, _OFFSET] = item.request.num_output_tokens
        return last.inputs._replace(errors={})

    def _build(self, output: SchedulerOutput) -> BatchInputs:
        num_requests = len(output.scheduled)
        width = max(len(s.block_ids) for s in output.scheduled)
        if self._block_table.shape != (num_requests, width):
            self._block_table = self.block_table[: num_requests * width].reshape(num_requests, width)
        block_table = self._block_table
        end = 0
        for index, scheduled in enumerate(output.scheduled):
            state = self._state(scheduled)
            state.update_blocks(scheduled.block_ids)
            block_table[index] = state.block_row[:width]
            first, count = scheduled.num_computed_tokens, scheduled.num_scheduled_tokens
            self.input_ids[end : end + count] = scheduled.request.token_ids_np[first : first + count]
            self._place_tokens(state, end, first, count)
            self.seq_lens[index] = first + count
            end += count
            self.query_start_loc[index + 1] = end
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": self._front("input_ids", self.input_ids, end),
            "positions": self._front("positions", self.positions, end),
            "slot_mapping": self._front("slot_mapping", self.slot_mapping, end),
            "block_table": block_table,
            "query_start_loc": self._front("query_start_loc", self.query_start_loc, num_requests + 1),
            "seq_lens": self._front("seq_lens", self.seq_lens, num_requests),
        }
        errors: dict[str, str] = {}
        rows = self._sample_rows(output.scheduled, errors)
        arrays.update(self._row_arrays(rows))
        max_logprobs = max((row.num_logprobs for row in rows), default=-1)
        if self.max_num_logprobs != max(max_logprobs, 0):
            self.max_num_logprobs = np.array(max(max_logprobs, 0), np.int32)
        arrays["max_num_logprobs"] = self.max_num_logprobs
        return BatchInputs(arrays, rows, max_logprobs >= 0, errors)

    def _front(self, name: str, buffer: NDArray[Any], count: int) -> NDArray[Any]:
        """The first `count` rows: the same array object as in the last step if nothing but values differs.

        So the session knows it again, and most steps of a decode bind nothing.
        """
        known = self._views.get(name)
        if known is not None and known[1] == count and known[0] is buffer:
            return known[2]
        view = buffer[:count]
        self._views[name] = buffer, count, view
        return view

    def _state(self, scheduled: ScheduledRequest) -> _RequestState:
        request_id = scheduled.request.request_id
        state = self.states.get(request_id)
        if state is None:
            state = self.states[request_id] = _RequestState(scheduled, self.max_blocks, self.vocab_size)
        return state

    def _place_tokens(self, state: _RequestState, start: int, first: int, count: int) -> None:
        """Positions and KV slots of the tokens [start, start + count) of the step: a request's from `first` on.

        One token, the usual case, takes plain integers: between two steps NumPy's code is no longer in the caches.
        """
        if count == 1:
            block, offset = divmod(first, self.block_size)
            self.positions[start] = first
            self.slot_mapping[start] = state.block_row[block] * self.block_size + offset
            return
        positions = self.arange[first : first + count]
        blocks, offsets = np.divmod(positions, np.int32(self.block_size))
        self.positions[start : start + count] = positions
        self.slot_mapping[start : start + count] = state.block_row[blocks] * np.int32(self.block_size) + offsets

    def _sample_rows(self, scheduled_requests: list[ScheduledRequest], errors: dict[str, str]) -> list[SampleRow]:
        """Fill the per-row buffers: prompt positions whose logprobs are wanted, and rows that sample.

        A request whose lists leave no token goes to `errors`; its row is forced, because the op refuses the whole step
        for a row that cannot be sampled.
        """
        for growable in self.lists.values():
            growable.size = 0
        rows: list[SampleRow] = []
        for index, scheduled in enumerate(scheduled_requests):
            request = scheduled.request
            if request.sampling_params.prompt_logprobs is not None and request.num_output_tokens == 0:
                self._prompt_rows(rows, scheduled, int(self.query_start_loc[index]))
            if scheduled.samples:
                row = self._new_row(len(rows))
                state = self.states[request.request_id].sampling
                self.logits_indices[row] = self.query_start_loc[index + 1] - 1
                self.sampling_floats[row] = state.floats
                self.sampling_ints[row] = state.ints
                self.sampling_ints[row, _OFFSET] = request.num_output_tokens
                rows.append(SampleRow(request.request_id, state.num_logprobs, is_prompt=False))
                if state.has_lists:
                    lists = list(state.row_lists(request))
                    if state.leaves_nothing(lists):
                        errors[request.request_id] = NO_TOKEN_LEFT
                        self.sampling_ints[row, _FORCED] = 0
                    for name, values in lists:
                        self.lists[name].append(values)
                self._close_row(row)
        return rows

    def _prompt_rows(self, rows: list[SampleRow], scheduled: ScheduledRequest, start: int) -> None:
        """One row per prompt position of this chunk whose next token is in the prompt too."""
        request, state = scheduled.request, self.states[scheduled.request.request_id].sampling
        first = scheduled.num_computed_tokens
        last = min(first + scheduled.num_scheduled_tokens, request.num_prompt_tokens - 1)
        for position in range(first, last):
            row = self._new_row(len(rows))
            self.logits_indices[row] = start + position - first
            self.sampling_floats[row] = state.floats
            self.sampling_ints[row] = state.ints
            self.sampling_ints[row, _NUM_LOGPROBS] = state.num_prompt_logprobs
            self.sampling_ints[row, _NUM_PROMPT] = 0  # these rows carry no history
            self.sampling_ints[row, _FORCED] = request.token_ids_np[position + 1]
            rows.append(SampleRow(request.request_id, state.num_prompt_logprobs, is_prompt=True))
            self._close_row(row)

    def _new_row(self, row: int) -> int:
        if row == len(self.logits_indices):
            old = self.sampling_floats, self.sampling_ints, self.logits_indices, self.locs
            self._reserve_rows(2 * row)
            self.sampling_floats[:row], self.sampling_ints[:row], self.logits_indices[:row] = old[:3]
            for name, loc in old[3].items():
                self.locs[name][: row + 1] = loc
        return row

    def _close_row(self, row: int) -> None:
        for name, loc_name in _LOC_OF_LIST.items():
            self.locs[loc_name][row + 1] = self.lists[name].size

    def _row_arrays(self, rows: list[SampleRow]) -> dict[str, NDArray[Any]]:
        count = len(rows)
        arrays: dict[str, NDArray[Any]] = {
            "logits_indices": self._front("logits_indices", self.logits_indices, count),
            "sampling_floats": self._front("sampling_floats", self.sampling_floats, count),
            "sampling_ints": self._front("sampling_ints", self.sampling_ints, count),
            "bitmask": self.bitmask,
        }
        arrays.update((name, self._front(name, grown.data, grown.size)) for name, grown in self.lists.items())
        arrays.update((name, self._front(name, loc, count + 1)) for name, loc in self.locs.items())
        return arrays


_LOC_OF_LIST = {  # a list's name -> the name of its row boundaries
    "token_history": "token_history_loc",
    "allowed_token_ids": "allowed_token_ids_loc",
    "banned_token_ids": "banned_token_ids_loc",
    "bias_token_ids": "bias_loc",
}
