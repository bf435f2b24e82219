"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ....runtime.engine.input_processor import MAX_N
from ..errors import bad_request
from . import responses
from .logprobs import completion_logprobs, prompt_logprobs
from .requests import CompletionRequest
from .sampling import Context, build_params, resolve_max_tokens
from .service import Service, check_output, merge

if TYPE_CHECKING:
    from ....runtime.outputs import CompletionOutput, PositionLogprobs, RequestOutput
    from ....runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str | None  # as given; None for token ids, whose text is decoded only for echo
    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """A completion request that passed every check."""

    request: CompletionRequest
    answer_id: str
    prompts: list[Prompt]
    echo_only: bool  # max_tokens 0: only the prompt is wanted, the one generated token is dropped
    created: int = field(default_factory=responses.now)


async def prepare(service: Service, request: CompletionRequest) -> Job:
    """Tokenise and validate every prompt; APIError or InvalidRequestError says what is wrong."""
    service.check_model(request.model)
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs are not available when stream=True", "prompt_logprobs")
    echo_only = request.max_tokens == 0 and request.echo
    given = _split(request.prompt)
    if len(given) > 1 and len(given) * (request.n or 1) > MAX_N:
        raise bad_request(f"{len(given)} prompts with n={request.n} are more than {MAX_N} completions", "n")
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            token_ids = await service.tokenize(prompt, add_special_tokens=request.add_special_tokens)
        else:
            token_ids = _check_ids(service, prompt)
        params = _params(service, request, Context(len(token_ids), service.max_model_len), echo_only)
        prompts.append(Prompt(prompt if isinstance(prompt, str) else None, token_ids, params))
    return Job(request, service.new_id("cmpl", request), prompts, echo_only)


def _split(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is an empty list; a text, token ids, or a list of either is expected", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _check_ids(service: Service, token_ids: list[int]) -> list[int]:
    vocab_size = service.engine.manifest.architecture.vocab_size
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise bad_request(f"prompt holds the token id {wrong}; ids are 0 to {vocab_size - 1}", "prompt")
    return token_ids


def _params(service: Service, request: CompletionRequest, context: Context, echo_only: bool) -> SamplingParams:
    context.check()
    defaults = service.engine.get_default_sampling_params()
    requested = 1 if echo_only else request.max_tokens
    echoes_logprobs = request.echo and request.logprobs is not None and request.prompt_logprobs is None
    return build_params(
        request,
        defaults,
        max_tokens=resolve_max_tokens(requested, defaults.max_tokens or context.num_free_tokens, context, "max_tokens"),
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if echoes_logprobs else request.prompt_logprobs,
    )


def _outputs(service: Service, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    return merge(
        [
            service.generate(prompt.token_ids, prompt.params, f"{job.answer_id}-{index}", job.request)
            for index, prompt in enumerate(job.prompts)
        ]
    )


async def complete(service: Service, job: Job) -> responses.Completion:
    """The whole answer, choices in order of the prompts."""
    finals: dict[int, RequestOutput] = {}
    async with aclosing(_outputs(service, job)) as outputs:
        async for index, output in outputs:
            check_output(output)
            finals[index] = output
    choices, num_completion_tokens = [], 0
    for index, prompt in enumerate(job.prompts):
        writer = _ChoiceWriter(service, job, prompt, index)
        final = finals[index]
        for choice in sorted(final.outputs, key=lambda c: c.index):
            choices.append(writer.choice(choice, final, whole=True))
            num_completion_tokens += writer.num_counted(choice)
    return responses.Completion(
        id=job.answer_id,
        created=job.created,
        model=job.request.model or service.config.model_name,
        choices=choices,
        usage=service.usage(
            sum(len(prompt.token_ids) for prompt in job.prompts),
            num_completion_tokens,
            sum(final.num_cached_tokens for final in finals.values()),
        ),
        warnings=next((final.warnings for final in finals.values() if final.warnings), msgspec.UNSET),
    )


async def stream(service: Service, job: Job) -> AsyncGenerator[str, None]:
    """Payloads of the event stream: chunks of the choices as they come, and the usage if it was asked for."""
    includes_usage, continuous = service.usage_mode(job.request)
    writers = [_ChoiceWriter(service, job, prompt, index) for index, prompt in enumerate(job.prompts)]
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
    num_tokens, cached = 0, [0] * len(writers)

    def chunk(choices: list[responses.CompletionChoice], usage: Any) -> responses.Completion:
        model = job.request.model or service.config.model_name
        return responses.Completion(id=job.answer_id, created=job.created, model=model, choices=choices, usage=usage)

    async with aclosing(_outputs(service, job)) as outputs:
        async for index, output in outputs:
            check_output(output)
            cached[index] = output.num_cached_tokens
            for choice in output.outputs:
                num_tokens += writers[index].num_counted(choice)
                if not writers[index].has_news(choice):
                    continue
                usage: Any = msgspec.UNSET
                if includes_usage:
                    usage = service.usage(num_prompt_tokens, num_tokens, sum(cached)) if continuous else None
                payload = chunk([writers[index].choice(choice, output, whole=False)], usage)
                if output.warnings and choice.finished:
                    payload.warnings = output.warnings
                yield responses.encode(payload)
    if includes_usage:
        yield responses.encode(chunk([], service.usage(num_prompt_tokens, num_tokens, sum(cached))))


class _ChoiceWriter:
    """Writes the choices of one prompt, and remembers how much of each was written."""

    def __init__(self, service: Service, job: Job, prompt: Prompt, prompt_index: int) -> None:
        self._request = job.request
        self._echo_only = job.echo_only
        self._prompt = prompt
        self._first_index = prompt_index * prompt.params.n
        self._as_ids = service.shows_tokens_as_ids(job.request)
        self._tokenizer = service.engine.get_tokenizer()
        self._offsets: dict[int, int] = {}  # choice index -> characters written
        self._prompt_text = ""
        if job.request.echo:
            given = prompt.text
            decoded = self._tokenizer.decode(prompt.token_ids) if given is None else given
            self._prompt_text = decoded

    def num_counted(self, choice: CompletionOutput) -> int:
        return 0 if self._echo_only else len(choice.token_ids)

    def has_news(self, choice: CompletionOutput) -> bool:
        """Whether a chunk is worth sending; half a character yields a token but no text yet."""
        first = choice.index not in self._offsets and self._request.echo
        asked = self._request.logprobs is not None or self._request.return_token_ids
        return bool(choice.text or choice.finished or first or asked)

    def choice(self, choice: CompletionOutput, output: RequestOutput, *, whole: bool) -> responses.CompletionChoice:
        """The choice; with `whole` all of it, otherwise what is new."""
        first = choice.index not in self._offsets
        offset = self._offsets.get(choice.index, 0)
        text = "" if self._echo_only else choice.text
        if first:
            text = self._prompt_text + text
        self._offsets[choice.index] = offset + len(text)
        result = responses.CompletionChoice(
            index=self._first_index + choice.index,
            text=text,
            logprobs=self._logprobs(choice, output, offset, first),
            finish_reason="length" if self._echo_only and choice.finished else choice.finish_reason,
            stop_reason=None if self._echo_only else choice.stop_reason,
        )
        if whole and self._request.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(output.prompt_logprobs) or []
        if self._request.return_token_ids:
            result.token_ids = [] if self._echo_only else choice.token_ids
            if first:
                result.prompt_token_ids = self._prompt.token_ids
        return result

    def _logprobs(
        self, choice: CompletionOutput, output: RequestOutput, offset: int, first: bool
    ) -> responses.CompletionLogprobs | None:
        if self._request.logprobs is None or choice.logprobs is None:
            return None
        token_ids = [] if self._echo_only else list(choice.token_ids)
        positions: list[PositionLogprobs | None] = [] if self._echo_only else list(choice.logprobs)
        if first and self._request.echo and output.prompt_logprobs is not None:
            token_ids = [*self._prompt.token_ids, *token_ids]
            positions = [*output.prompt_logprobs, *positions]
        return completion_logprobs(token_ids, positions, as_ids=self._as_ids, offset=offset, decode=self._decode)

    def _decode(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
