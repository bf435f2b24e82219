"""A caller's prompt and parameters -> EngineCoreRequests. What is wrong with a request is refused here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ..errors import InvalidRequestError
from ..runner.sampling_state import NO_TOKEN_LEFT
from ..sampling_params import SamplingParams, require_sampling_params
from .messages import EngineCoreRequest

if TYPE_CHECKING:
    from ...backends.contract.manifest import Manifest
    from ..tokenizer import Tokenizer

# A text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}, either with an optional "cache_salt".
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]

MAX_N: Final = 16384
MAX_STRINGS: Final = 1024  # stop strings and bad words of a request: each is looked for after every token
_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "cache_salt")


class InputProcessor:
    """Validates and tokenises. `max_model_len` in tokens; `max_logprobs` -1 = no limit; `draw_seed` gives 64 bits."""

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        max_logprobs: int,
        draw_seed: Callable[[], int],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = manifest.architecture.vocab_size
        self._model_max_len = manifest.architecture.max_position_embeddings
        self._eos_token_ids = tuple(manifest.tokenizer.eos_token_ids)
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._draw_seed = draw_seed
        self._serial = itertools.count()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> tuple[str | None, list[EngineCoreRequest]]:
        """The prompt's text (None for token ids) and the request's n sequences.

        InvalidRequestError (and the tokenizer's PromptTooLongError, before any work) says what is wrong.
        """
        require_sampling_params(params)
        if priority != 0:
            raise InvalidRequestError(
                f"priority is {priority!r}: requests are served first come, first served in this version; leave it out"
            )
        arrival_time = time.monotonic()
        text, given_ids, own_salt = _parse(prompt)
        token_ids = self._encode(text, add_special_tokens) if text is not None else self._check_ids(given_ids)
        self._check_length(len(token_ids))
        self._check_params(params)
        resolved = self._resolve(params, len(token_ids))
        salt = _check_salt(own_salt if cache_salt is None else cache_salt)
        # Unique for ever: a caller may use an id again while outputs of the aborted request are still on their way.
        core_id = f"{request_id}#{next(self._serial)}"
        return text, [
            EngineCoreRequest(child_id, token_ids, child_params, arrival_time, priority, salt)
            for child_id, child_params in _children(core_id, resolved)
        ]

    # --- prompt ---------------------------------------------------------------------------------------------------
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self._tokenizer.check_prompt_bytes(text, self._max_model_len)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_ids(self, token_ids: Sequence[int]) -> list[int]:
        ids = list(token_ids)
        for position, token_id in enumerate(ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"prompt_token_ids[{position}] is {token_id!r}; token ids are integers in [0, {self._vocab_size})"
                )
        return ids

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens == 0:
            raise InvalidRequestError("the prompt is empty: at least one token is needed")
        if num_tokens >= self._max_model_len:
            limit, advice = "", f", or raise max_model_len (to {self._model_max_len} at most, the model's own limit)"
            if self._max_model_len >= self._model_max_len:
                limit, advice = ", which is the model's own limit,", ""
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens; max_model_len is {self._max_model_len}{limit} and one position "
                f"at least is needed for output: shorten the prompt{advice}"
            )

    # --- parameters -----------------------------------------------------------------------------------------------
    def _check_params(self, params: SamplingParams) -> None:
        if params.n > MAX_N:
            raise InvalidRequestError(f"n must be at most {MAX_N}, got {params.n}")
        for name, strings in (("stop", params.stop_strings), ("bad_words", params.bad_words or ())):
            if len(strings) > MAX_STRINGS:
                raise InvalidRequestError(f"{name} has {len(strings)} strings, at most {MAX_STRINGS} are accepted")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is None:
                continue
            count = self._vocab_size if wanted == -1 else wanted
            limit = self._vocab_size if self._max_logprobs == -1 else self._max_logprobs
            if count > limit:
                raise InvalidRequestError(
                    f"{name}={wanted} asks for {count} tokens per position, more than max_logprobs={limit} of this "
                    "engine: ask for fewer, or start it with a higher max_logprobs (-1: the whole vocabulary)"
                )
        for name, ids in (
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", params.stop_token_ids or ()),
        ):
            outside = [t for t in ids if not 0 <= t < self._vocab_size]
            if outside:
                raise InvalidRequestError(f"{name}: token ids {outside[:10]} are not in [0, {self._vocab_size})")

    def _resolve(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The engine's copy: nothing in it is left to be decided later."""
        resolved = params.clone(
            max_tokens=self._max_model_len - num_prompt_tokens if params.max_tokens is None else params.max_tokens,
            seed=self._draw_seed() - 2**63 if params.seed is None else params.seed,
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=self._tokenize_bad_words(params.bad_words or []),
        )
        banned = {words[0] for words in resolved.bad_words_token_ids if len(words) == 1}
        if resolved.min_tokens:
            banned |= resolved.all_stop_token_ids
        if banned.issuperset(resolved.allowed_token_ids or range(self._vocab_size)):
            raise InvalidRequestError(NO_TOKEN_LEFT)
        return resolved

    def _tokenize_bad_words(self, bad_words: list[str]) -> list[list[int]]:
        """Each word as it is tokenised at the start of a text and after a space."""
        sequences: list[list[int]] = []
        for word in bad_words:
            for spelling in (word.lstrip(), " " + word.lstrip()):
                ids = self._tokenizer.encode(spelling, add_special_tokens=False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences


def _parse(prompt: Prompt) -> tuple[str | None, Sequence[int], str | None]:
    """(text, token ids, cache salt) of a prompt; the ids count only when the text is None."""
    if isinstance(prompt, str):
        return prompt, (), None
    if isinstance(prompt, Mapping):
        unknown = sorted(set(prompt) - set(_PROMPT_KEYS))
        if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise InvalidRequestError(
                f"a prompt given as a dict has either 'prompt' or 'prompt_token_ids', and may have 'cache_salt'; "
                f"got the keys {sorted(prompt)}"
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids", ())
        if not isinstance(text, str | None) or ("prompt" in prompt) != (text is not None) or not _is_list(ids):
            raise InvalidRequestError("'prompt' must be a string and 'prompt_token_ids' a list of token ids")
        return text, ids, prompt.get("cache_salt")
    if _is_list(prompt):
        return None, prompt, None
    raise InvalidRequestError(f"a prompt is a string, a list of token ids or a dict, got {type(prompt).__name__}")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _check_salt(cache_salt: object) -> str | None:
    if cache_salt is None:
        return None
    if not isinstance(cache_salt, str) or not cache_salt:
        raise InvalidRequestError(f"cache_salt must be a non-empty string, got {cache_salt!r}")
    return cache_salt


def _children(core_id: str, params: SamplingParams) -> list[tuple[str, SamplingParams]]:
    """Ids and parameters of the n sequences; the seeds follow one another, wrapping at 64 bits."""
    if params.n == 1:
        return [(core_id, params)]
    seed = params.seed or 0
    return [
        (f"{core_id}.{index}", params.clone(n=1, seed=(seed + index + 2**63) % 2**64 - 2**63))
        for index in range(params.n)
    ]
