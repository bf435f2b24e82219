"""Request schemas. Every field is honoured; the ones that are refused are in unsupported.py, all others unknown."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class WireModel(BaseModel):
    """JSON types as they are: no number out of a string, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(WireModel):
    include_usage: bool = False  # a last chunk with the usage and no choices
    continuous_usage_stats: bool = False  # running usage on every chunk; only with include_usage


class GenerationRequest(WireModel):
    """What both routes share. None = the model's default, then the library's."""

    model: str | None = None  # a served name; None = the first
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # accepted and not used: nothing is kept about who asks
    request_id: str | None = Field(default=None, min_length=1, max_length=256)  # part of the answer's id
    cache_salt: str | None = Field(default=None, min_length=1)  # only requests with the same salt share cached prefixes
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # tokens of logprobs as "token_id:N"

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("Stream options can only be defined when `stream=True`.")
        return self


class TextPart(WireModel):
    type: Literal["text"]
    text: str


class ChatMessage(WireModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None  # handed to the template


class ChatCompletionRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template writes its own
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None  # only with --trust-request-chat-template
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("when using `top_logprobs`, `logprobs` must be set to true.")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` and `max_completion_tokens` are given and differ; give one of them.")
        return self


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False  # the prompt comes back in front of the text
    logprobs: int | None = None
    add_special_tokens: bool = True
