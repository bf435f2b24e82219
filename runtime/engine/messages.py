"""What goes into the engine core; what comes out is scheduler/output.py's EngineCoreOutputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ..sampling_params import SamplingParams


class EngineCoreRequest(msgspec.Struct, frozen=True):
    """One sequence, validated (engine/input_processor.py): the core trusts every field."""

    request_id: str  # the core's: unique over the engine's life, unlike the caller's
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # the engine's own copy: max_tokens, seed, eos and bad words filled in
    arrival_time: float  # time.monotonic()
    priority: int = 0
    cache_salt: str | None = None
