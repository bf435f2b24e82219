"""From a request's fields to SamplingParams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import bad_request
from .requests import GenerationRequest

if TYPE_CHECKING:
    from ....runtime.sampling_params import SamplingParams

# Fields that fall back on the model's own default when the request leaves them out.
_DEFAULTED = (
    "n",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
)
_COPIED = (
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@dataclass(frozen=True, slots=True)
class Context:
    """How much room a prompt leaves."""

    num_prompt_tokens: int
    max_model_len: int  # tokens

    @property
    def num_free_tokens(self) -> int:
        return self.max_model_len - self.num_prompt_tokens

    def check(self) -> None:
        """APIError 400 unless at least one token can be generated."""
        if self.num_prompt_tokens == 0:
            raise bad_request("the prompt is empty: it has no tokens", "prompt")
        if self.num_free_tokens < 1:
            raise bad_request(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has "
                f"{self.num_prompt_tokens} tokens, and at least one is generated. Please shorten the prompt."
            )


def resolve_max_tokens(requested: int | None, default: int, context: Context, param: str) -> int:
    """Tokens to generate at most. A request that cannot be met is refused (APIError 400), a default adapts."""
    if requested is None:
        return min(default, context.num_free_tokens)
    if requested > context.num_free_tokens:
        raise bad_request(
            f"{param} is too large: {requested}. This model's maximum context length is {context.max_model_len} tokens "
            f"and your request has {context.num_prompt_tokens} input tokens "
            f"({requested} > {context.max_model_len} - {context.num_prompt_tokens}).",
            param,
        )
    return requested


def build_params(
    request: GenerationRequest,
    defaults: SamplingParams,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """SamplingParams of a request; InvalidRequestError names a value that is out of range."""
    from ....runtime.sampling_params import RequestOutputKind, SamplingParams

    values: dict[str, Any] = {}
    for name in _DEFAULTED:
        given = getattr(request, name)
        values[name] = getattr(defaults, name) if given is None else given
    for name in _COPIED:
        values[name] = getattr(request, name)
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
    )
