"""SamplingParams: what a caller asks of the sampler and of the stop rules. Fields, defaults and ranges are vLLM's."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, Final, Self, cast

import msgspec

from .errors import InvalidRequestError

SAMPLING_EPS: Final = 1e-5  # temperatures below are greedy
MIN_TEMPERATURE: Final = 1e-2  # positive temperatures below are raised to it, with a warning
MAX_TEMPERATURE: Final = 2.0
MAX_LOGIT_BIAS: Final = 100.0
MAX_REPETITION_PENALTY: Final = 1e20  # and its inverse: logits must stay finite in float32
MIN_TOP_P: Final = 1e-30  # it is a float32 in the sampler, where 0 means nothing
_MAX_ID_DIGITS: Final = 20
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class RequestOutputKind(Enum):
    """What each RequestOutput of a request carries."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, when the request is finished


class SamplingParams(msgspec.Struct, eq=False):
    """Parameters of one request, checked on construction (InvalidRequestError names field and value).

    Treat as immutable: the engine works on copies. `warnings` says what was adjusted.
    """

    n: int = 1  # completions of the prompt
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    seed: int | None = None  # None or -1 = a fresh one per request
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None = the rest of the context
    min_tokens: int = 0  # no eos and no stop before
    logprobs: int | None = None  # the sampled token and the top n; -1 = the whole vocabulary
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    # No arguments: filled by this class and, on its own copy, by the engine (engine/input_processor.py).
    warnings: list[str] = []
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: list[list[int]] = []

    def __post_init__(self) -> None:
        if (self.warnings, self.eos_token_ids, self.bad_words_token_ids) != ([], (), []):
            raise TypeError(
                "warnings, eos_token_ids and bad_words_token_ids are results, not arguments; to copy: clone()"
            )
        self.stop = [self.stop] if isinstance(self.stop, str) else _own_list("stop", self.stop) or []
        self.stop_token_ids = _own_list("stop_token_ids", self.stop_token_ids) or []
        self.bad_words = _own_list("bad_words", self.bad_words) or []
        self.allowed_token_ids = _own_list("allowed_token_ids", self.allowed_token_ids)
        _check_types(self)
        _check_numbers(self)
        _check_lists(self)
        self._normalise()

    def _normalise(self) -> None:
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))  # looked through after every token
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            self.warnings.append(
                f"temperature {self.temperature:g} is below {MIN_TEMPERATURE}, where probabilities lose all precision: "
                f"{MIN_TEMPERATURE} is used"
            )
            self.temperature = MIN_TEMPERATURE
        if self.is_greedy:
            if self.n > 1:
                raise InvalidRequestError(f"n must be 1 when using greedy sampling (temperature 0), got {self.n}")
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        if self.logit_bias:
            far = sorted(t for t, bias in self.logit_bias.items() if abs(bias) > MAX_LOGIT_BIAS)
            if far:
                self.warnings.append(f"logit_bias of tokens {far} clamped to [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]")
                self.logit_bias = {
                    t: max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias)) for t, bias in self.logit_bias.items()
                }

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as the list it is after construction."""
        return self.stop if isinstance(self.stop, list) else []

    @property
    def all_stop_token_ids(self) -> frozenset[int]:
        """eos and stop token ids: what min_tokens bans. eos is in it even under ignore_eos, as in vLLM."""
        return frozenset(self.eos_token_ids).union(self.stop_token_ids or ())

    @property
    def uses_penalties(self) -> bool:
        """Whether the sampler needs this request's token history."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def __eq__(self, other: object) -> bool:
        """Whether the arguments are the same; results do not count."""
        if not isinstance(other, SamplingParams):
            return NotImplemented
        names = (name for name in self.__struct_fields__ if name not in _RESULTS)
        return all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy.deepcopy, which would construct anew, with results as arguments."""
        return _restored, ({name: getattr(self, name) for name in self.__struct_fields__},)

    def clone(self, **changes: Any) -> Self:
        """A copy with its own lists and `changes` set unchecked (an unknown field is an AttributeError)."""
        twin = copy.copy(self)
        twin.warnings = list(self.warnings)
        for name, value in changes.items():
            setattr(twin, name, value)
        return twin


def require_sampling_params(value: object) -> None:
    """InvalidRequestError for anything but SamplingParams."""
    if not isinstance(value, SamplingParams):
        raise InvalidRequestError(f"sampling_params must be a SamplingParams, got {type(value).__name__}")


def _restored(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams().clone(**fields)


_RESULTS = ("warnings", "eos_token_ids", "bad_words_token_ids")
_INTS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTS = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_FLOATS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_BOOLS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _own_list(name: str, value: Any) -> list[Any] | None:
    """A copy of any collection of values; a string or a mapping would fall apart into letters or keys."""
    if value is None:
        return None
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise InvalidRequestError(f"{name} must be a list, got {value!r} of type {type(value).__name__}")
    return list(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    """Also of an integer that no float can hold, which is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: object) -> str:
    """`value` of any size in a message."""
    if _is_int(value) and cast("int", value).bit_length() > 1024:
        return f"an integer of {cast('int', value).bit_length()} bits"
    return repr(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_types(p: SamplingParams) -> None:
    def refuse(name: str, expected: str) -> None:
        value = getattr(p, name)
        raise InvalidRequestError(f"{name} must be {expected}, got {value!r} of type {type(value).__name__}")

    for name in _INTS:
        if not _is_int(getattr(p, name)):
            refuse(name, "an integer")
    for name in _OPTIONAL_INTS:
        if getattr(p, name) is not None and not _is_int(getattr(p, name)):
            refuse(name, "an integer or None")
    for name in _FLOATS:
        value = getattr(p, name)
        if not _is_number(value):
            refuse(name, "a number")
        if not _is_finite(value):
            raise InvalidRequestError(f"{name} must be a finite number, got {_shown(value)}")
    for name in _BOOLS:
        if not isinstance(getattr(p, name), bool):
            refuse(name, "True or False")
    if not isinstance(p.output_kind, RequestOutputKind):
        refuse("output_kind", "a RequestOutputKind")


def _check_numbers(p: SamplingParams) -> None:
    def require(ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise InvalidRequestError(f"{name} must be {expected}, got {getattr(p, name)}")

    require(p.n >= 1, "n", "at least 1")
    require(-2.0 <= p.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]")
    require(-2.0 <= p.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]")
    require(p.repetition_penalty > 0.0, "repetition_penalty", "greater than zero")
    in_range = 1 / MAX_REPETITION_PENALTY <= p.repetition_penalty <= MAX_REPETITION_PENALTY
    require(in_range, "repetition_penalty", f"in [{1 / MAX_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]")
    require(p.temperature >= 0.0, "temperature", "non-negative")
    require(p.temperature <= MAX_TEMPERATURE, "temperature", "in [0, 2]")
    require(0.0 < p.top_p <= 1.0, "top_p", "in (0, 1]")
    require(p.top_p >= MIN_TOP_P, "top_p", f"at least {MIN_TOP_P:g}")
    require(-1 <= p.top_k < 2**31, "top_k", "0 (off), -1 (off) or at least 1")
    require(0.0 <= p.min_p <= 1.0, "min_p", "in [0, 1]")
    require(p.seed is None or _INT64_MIN <= p.seed <= _INT64_MAX, "seed", "a signed 64-bit integer")
    require(p.max_tokens is None or p.max_tokens >= 1, "max_tokens", "at least 1")
    require(p.min_tokens >= 0, "min_tokens", "greater than or equal to 0")
    if p.max_tokens is not None:
        require(p.min_tokens <= p.max_tokens, "min_tokens", f"less than or equal to max_tokens={p.max_tokens}")
    require(p.logprobs is None or p.logprobs >= -1, "logprobs", "non-negative or -1 (the whole vocabulary)")
    require(
        p.prompt_logprobs is None or p.prompt_logprobs >= -1,
        "prompt_logprobs",
        "non-negative or -1 (the whole vocabulary)",
    )


def _check_lists(p: SamplingParams) -> None:
    for name in ("stop", "bad_words"):
        values = getattr(p, name)
        if not all(isinstance(s, str) for s in values):
            raise InvalidRequestError(f"{name} must contain only strings, got {values}")
        if not all(values):
            raise InvalidRequestError(f"{name} cannot contain an empty string, got {values}")
    if p.stop and not p.detokenize:
        raise InvalidRequestError("stop strings need the text of the output: set detokenize=True to use stop")
    if not all(_is_int(t) for t in p.stop_token_ids or ()):
        raise InvalidRequestError(f"stop_token_ids must contain only integers, got {p.stop_token_ids}")
    if p.allowed_token_ids is not None:
        if not p.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty: leave it out (None) to allow every token")
        if not all(_is_int(t) for t in p.allowed_token_ids):
            raise InvalidRequestError(f"allowed_token_ids must contain only integers, got {p.allowed_token_ids}")
    if p.logit_bias is not None:
        if not isinstance(p.logit_bias, dict):
            raise InvalidRequestError(f"logit_bias must map token ids to numbers, got {p.logit_bias!r}")
        p.logit_bias = {_bias_token(t): bias for t, bias in p.logit_bias.items()}
        for token, bias in p.logit_bias.items():
            if not _is_number(bias) or not _is_finite(bias):
                raise InvalidRequestError(f"logit_bias of token {token} must be a finite number, got {_shown(bias)}")


def _bias_token(key: object) -> int:
    """The token id of a logit_bias key; JSON objects have string keys, so "42" is 42."""
    if _is_int(key):
        return key  # type: ignore[return-value]
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS:
        return int(key)
    raise InvalidRequestError(f"logit_bias keys must be token ids, got {repr(key)[:80]}")
