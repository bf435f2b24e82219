"""Request schemas. Every field is honoured; the ones that are refused are in unsupported.py, all others unknown."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, field_validator, model_validator

from ..body import UnknownFieldsError
from ..config import MAX_COMPLETION_PROMPTS


class _UpToFirstFault:
    """A list's validation ends at its first fault: one per item would be a million for a body of megabytes."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        assert schema["type"] == "list"
        return {**schema, "fail_fast": True}


Item = TypeVar("Item")
List = Annotated[list[Item], _UpToFirstFault()]


class WireModel(BaseModel):
    """JSON types as they are: no number out of a string, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, value: Any) -> Any:
        """All in one fault: see List."""
        if isinstance(value, dict) and (unknown := [name for name in value if name not in cls.model_fields]):
            raise UnknownFieldsError(unknown)
        return value


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
    stop: str | List[str] | None = None
    stop_token_ids: List[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, Any] | None = None  # SamplingParams checks the values, up to the first fault
    allowed_token_ids: List[int] | None = None
    bad_words: List[str] | None = None
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

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parts(cls, value: Any) -> Any:
        """By their type, not by the fields that only they have."""
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "text":
            raise ValueError(f"a part of type {kind[:40]!r} is not supported: the server takes text only")
        return value


class ChatMessage(WireModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | List[TextPart]
    name: str | None = None  # handed to the template


class ChatCompletionRequest(GenerationRequest):
    messages: List[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template writes its own
    documents: List[dict[str, Any]] | None = None
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
    prompt: str | List[str] | List[int] | List[List[int]]
    echo: bool = False  # the prompt comes back in front of the text
    logprobs: int | None = None
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _bound_prompts(cls, value: Any) -> Any:
        """Before a million of them are looked at."""
        if isinstance(value, list) and len(value) > MAX_COMPLETION_PROMPTS and not isinstance(value[0], int):
            raise ValueError(f"There are {len(value)} prompts, at most {MAX_COMPLETION_PROMPTS} are accepted")
        return value
