"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ....runtime.tokenizer import CONVERSATION_VARIABLES
from ..errors import bad_request
from . import responses
from .logprobs import chat_logprobs, prompt_logprobs
from .messages import to_conversation
from .requests import ChatCompletionRequest
from .sampling import Context, build_params, resolve_max_tokens
from .service import Service, check_output, last

if TYPE_CHECKING:
    from ....runtime.outputs import CompletionOutput, RequestOutput
    from ....runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """A chat request that passed every check."""

    request: ChatCompletionRequest
    answer_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    created: int = field(default_factory=responses.now)


async def prepare(service: Service, request: ChatCompletionRequest) -> Job:
    """Render, tokenise and validate; APIError or InvalidRequestError says what is wrong."""
    service.check_model(request.model)
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs are not available when stream=True", "prompt_logprobs")
    text = _render(service, request)
    token_ids = await service.tokenize(text, add_special_tokens=request.add_special_tokens)
    context = Context(len(token_ids), service.max_model_len)
    context.check()
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    requested = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = build_params(
        request,
        service.engine.get_default_sampling_params(),
        max_tokens=resolve_max_tokens(
            requested, service.engine.default_max_tokens or context.num_free_tokens, context, param
        ),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    return Job(request, service.new_id("chatcmpl", request), token_ids, params)


def _render(service: Service, request: ChatCompletionRequest) -> str:
    kwargs = {**service.config.default_chat_template_kwargs, **(request.chat_template_kwargs or {})}
    own_template = request.chat_template is not None or "chat_template" in (request.chat_template_kwargs or {})
    if own_template and not service.config.trust_request_chat_template:
        raise bad_request(
            "chat_template in a request is refused: the server was not started with --trust-request-chat-template",
            "chat_template",
        )
    template = kwargs.pop("chat_template", None)
    template = request.chat_template or template or service.config.chat_template
    if clash := sorted(CONVERSATION_VARIABLES & kwargs.keys()):
        raise bad_request(f"chat_template_kwargs must not set {', '.join(clash)}", "chat_template_kwargs")
    tokenizer = service.engine.get_tokenizer()
    return tokenizer.apply_chat_template(
        to_conversation(request.messages),
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=template,
        **kwargs,
    )


async def complete(service: Service, job: Job) -> responses.ChatCompletion:
    """The whole answer."""
    output = await last(service.generate(job.prompt_token_ids, job.params, job.answer_id, job.request))
    return responses.ChatCompletion(
        id=job.answer_id,
        created=job.created,
        model=service.config.model_name if job.request.model is None else job.request.model,
        choices=[_choice(service, job, choice) for choice in sorted(output.outputs, key=lambda c: c.index)],
        usage=service.usage(
            len(job.prompt_token_ids), sum(len(c.token_ids) for c in output.outputs), output.num_cached_tokens
        ),
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
        prompt_token_ids=job.prompt_token_ids if job.request.return_token_ids else msgspec.UNSET,
        warnings=output.warnings or msgspec.UNSET,
    )


def _choice(service: Service, job: Job, choice: CompletionOutput) -> responses.ChatChoice:
    return responses.ChatChoice(
        index=choice.index,
        message=responses.AssistantMessage(content=choice.text),
        logprobs=_logprobs(service, job, choice),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if job.request.return_token_ids else msgspec.UNSET,
    )


def _logprobs(service: Service, job: Job, choice: CompletionOutput) -> responses.ChatLogprobs | None:
    as_ids = service.shows_tokens_as_ids(job.request)
    return chat_logprobs(choice.token_ids, choice.logprobs, job.request.top_logprobs or 0, as_ids)


async def stream(service: Service, job: Job) -> AsyncGenerator[str, None]:
    """Payloads of the event stream: a role chunk per choice, deltas, and the usage if it was asked for."""
    writer = _ChunkWriter(service, job)
    outputs = service.generate(job.prompt_token_ids, job.params, job.answer_id, job.request)
    async with aclosing(outputs):
        async for output in outputs:
            check_output(output)
            for payload in writer.write(output):
                yield payload
    if writer.includes_usage:
        yield responses.encode(writer.chunk([], usage=writer.usage()))


class _ChunkWriter:
    """Turns outputs into chunks, and counts."""

    def __init__(self, service: Service, job: Job) -> None:
        self._service = service
        self._job = job
        self.includes_usage, self._continuous = service.usage_mode(job.request)
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._started = False

    def write(self, output: RequestOutput) -> list[str]:
        self._num_cached_tokens = output.num_cached_tokens
        payloads = [] if self._started else [responses.encode(chunk) for chunk in self._first_chunks(output)]
        self._started = True
        for choice in output.outputs:
            self._num_tokens += len(choice.token_ids)
            if choice.text or choice.finished or choice.logprobs or self._job.request.return_token_ids:
                payloads.append(responses.encode(self.chunk([self._delta(choice)])))
        return payloads

    def _first_chunks(self, output: RequestOutput) -> list[responses.ChatChunk]:
        delta = responses.ChatDelta(role="assistant", content="")
        indices = range(self._job.params.n)
        chunks = [self.chunk([responses.ChatChunkChoice(index=index, delta=delta)]) for index in indices]
        if self._job.request.return_token_ids:
            chunks[0].prompt_token_ids = self._job.prompt_token_ids
        if output.warnings:
            chunks[0].warnings = output.warnings
        return chunks

    def _delta(self, choice: CompletionOutput) -> responses.ChatChunkChoice:
        return responses.ChatChunkChoice(
            index=choice.index,
            delta=responses.ChatDelta(content=choice.text),
            logprobs=_logprobs(self._service, self._job, choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason if choice.finished else msgspec.UNSET,
            token_ids=choice.token_ids if self._job.request.return_token_ids else msgspec.UNSET,
        )

    def chunk(self, choices: list[responses.ChatChunkChoice], usage: Any = msgspec.UNSET) -> responses.ChatChunk:
        if usage is msgspec.UNSET and self.includes_usage:
            usage = self.usage() if self._continuous else None
        return responses.ChatChunk(
            id=self._job.answer_id,
            created=self._job.created,
            model=self._job.request.model or self._service.config.model_name,
            choices=choices,
            usage=usage,
        )

    def usage(self) -> responses.Usage:
        return self._service.usage(len(self._job.prompt_token_ids), self._num_tokens, self._num_cached_tokens)
