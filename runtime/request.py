"""Request: one sequence on its way through the scheduler, and the statuses it goes through."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from .outputs import FinishReason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .sampling_params import SamplingParams

_MIN_TOKEN_CAPACITY = 64


class RequestStatus(IntEnum):
    """Where a request is. Everything after PREEMPTED is final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waits again, its KV blocks are gone
    FINISHED_STOPPED = 3  # eos, stop token or (set from outside) stop string
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """The public reason of a final status, None for the others."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class EngineCoreEventType(StrEnum):
    QUEUED = "queued"
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"


class EngineCoreEvent(msgspec.Struct, frozen=True):
    """A moment in a request's life; `timestamp` is time.monotonic() in seconds."""

    type: EngineCoreEventType
    timestamp: float


class Request:
    """State of one sequence. The scheduler owns it; the runner only reads it.

    `all_token_ids` is prompt then output. `token_ids_np` holds the same ids for the runner, in a buffer that grows by
    doubling. `cache_salt` and `lora_name` take part in the block hashes, so they are fixed at construction.
    """

    __slots__ = (
        "_all_token_ids",
        "_events",
        "_output_token_ids",
        "_token_buffer",
        "arrival_time",
        "block_hasher",
        "block_hashes",
        "cache_salt",
        "eos_token_ids",
        "error",
        "lora_name",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "status",
        "stop_reason",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """`arrival_time` is time.monotonic() (now, if None). Raises ValueError for an empty prompt."""
        if len(prompt_token_ids) == 0:
            raise ValueError(f"request {request_id!r}: the prompt has no tokens; at least one is needed")
        self.request_id = request_id
        self.prompt_token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.sampling_params = sampling_params
        self.max_tokens: int | None = sampling_params.max_tokens  # None: up to max_model_len
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.eos_token_ids = frozenset(eos_token_ids)

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None  # the stop token id or stop string that matched; None for eos
        self.error: str | None = None  # why, for FINISHED_ERROR
        self.num_computed_tokens = 0  # tokens whose KV is in the cache
        self.num_cached_tokens = 0  # prompt tokens that came from the prefix cache when first admitted
        self.num_preemptions = 0

        self._output_token_ids: list[int] = []
        self._all_token_ids: list[int] = self.prompt_token_ids.copy()
        self._token_buffer: NDArray[np.int32] = np.empty(
            max(_MIN_TOKEN_CAPACITY, 2 * self.num_prompt_tokens), dtype=np.int32
        )
        self._token_buffer[: self.num_prompt_tokens] = self.prompt_token_ids
        self._events: list[EngineCoreEvent] = []
        self.block_hashes: list[bytes] = []  # one per full block of all_token_ids, chained
        self.block_hasher: Callable[[Request], list[bytes]] | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )

    # --- tokens ---------------------------------------------------------------------------------------------------
    @property
    def output_token_ids(self) -> Sequence[int]:
        """Read-only by contract; grows through append_output_token_ids."""
        return self._output_token_ids

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt then output; read-only by contract."""
        return self._all_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self._output_token_ids)

    @property
    def token_ids_np(self) -> NDArray[np.int32]:
        """int32 [num_tokens] view of all_token_ids; a later append may move the buffer, so take it anew each step."""
        return self._token_buffer[: len(self._all_token_ids)]

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Append sampled tokens and hash the blocks that they complete."""
        new = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        start = len(self._all_token_ids)
        self._output_token_ids.extend(new)
        self._all_token_ids.extend(new)
        end = len(self._all_token_ids)
        if end > len(self._token_buffer):
            grown = np.empty(max(end, 2 * len(self._token_buffer)), dtype=np.int32)
            grown[:start] = self._token_buffer[:start]
            self._token_buffer = grown
        self._token_buffer[start:end] = new
        self._update_block_hashes()

    # --- prefix cache ---------------------------------------------------------------------------------------------
    def set_block_hasher(self, block_hasher: Callable[[Request], list[bytes]] | None) -> None:
        """Called by the scheduler on admission: hash the full blocks now and whenever one fills up."""
        self.block_hasher = block_hasher
        self.block_hashes = []
        self._update_block_hashes()

    def _update_block_hashes(self) -> None:
        if self.block_hasher is not None:
            self.block_hashes.extend(self.block_hasher(self))

    def token_bytes(self, start: int, end: int) -> bytes:
        """Tokens [start, end) as native int32 bytes, for hashing."""
        return self._token_buffer[start:end].tobytes()

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Prompt logprobs need the logits of every prompt position, so nothing may be taken from the cache."""
        return self.sampling_params.prompt_logprobs is not None

    # --- life -----------------------------------------------------------------------------------------------------
    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.status.finish_reason

    def record_event(self, event_type: EngineCoreEventType, timestamp: float | None = None) -> None:
        self._events.append(EngineCoreEvent(event_type, time.monotonic() if timestamp is None else timestamp))

    def take_events(self) -> list[EngineCoreEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
