"""What the routes share: the engine, the settings, and the steps from a prompt to a running request."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from ..config import ServerConfig
from ..errors import APIError
from .engine import Engine
from .requests import GenerationRequest
from .responses import PromptTokensDetails, Usage

if TYPE_CHECKING:
    from ....runtime.outputs import RequestOutput
    from ....runtime.sampling_params import SamplingParams

_TOKENISE_INLINE_CHARS = 2048  # a longer text is tokenised off the event loop, so that other streams go on


class Service:
    """One per server; stateless but for what it is made of."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and output together."""
        length = self.engine.model_config.max_model_len
        if length is None:
            raise RuntimeError("the engine's configuration is not resolved: max_model_len is unknown")
        return length

    def check_model(self, name: str | None) -> None:
        """APIError 404 unless the name is one that this server answers to."""
        if name is not None and name not in self.config.served_model_names:
            served = ", ".join(self.config.served_model_names)
            shown = name if len(name) <= 100 else f"{name[:100]}…"
            raise APIError(404, f"The model `{shown}` does not exist. This server has {served}.", param="model")

    def new_id(self, prefix: str, request: GenerationRequest) -> str:
        """The answer's id: `chatcmpl-…` or `cmpl-…`, with the caller's own request_id if there is one."""
        return f"{prefix}-{request.request_id or uuid.uuid4().hex}"

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; a text that cannot fit is refused by its length before any work (InvalidRequestError)."""
        tokenizer = self.engine.get_tokenizer()
        tokenizer.check_prompt_bytes(text, self.max_model_len)
        if len(text) <= _TOKENISE_INLINE_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, answer_id: str, request: GenerationRequest
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of the engine; its own id is unique even when the caller's is not."""
        engine_id = f"{answer_id}-{secrets.token_hex(4)}"
        return self.engine.generate(prompt, params, engine_id, cache_salt=request.cache_salt)

    def usage(self, num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> Usage:
        details = None
        if self.config.enable_prompt_tokens_details:
            details = PromptTokensDetails(cached_tokens=num_cached_tokens)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=details,
        )

    def usage_mode(self, request: GenerationRequest) -> tuple[bool, bool]:
        """(a usage chunk at the end, running usage on every chunk) of a stream."""
        if self.config.enable_force_include_usage:
            return True, True
        options = request.stream_options
        if options is None or not options.include_usage:
            return False, False
        return True, options.continuous_usage_stats

    def shows_tokens_as_ids(self, request: GenerationRequest) -> bool:
        asked = request.return_tokens_as_token_ids
        return self.config.return_tokens_as_token_ids if asked is None else asked


def check_output(output: RequestOutput) -> None:
    """APIError 500 when the engine gave this request up."""
    if output.error is not None or any(choice.finish_reason == "error" for choice in output.outputs):
        raise APIError(500, output.error or "the engine could not complete this request")


async def last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """The final output of a request."""
    final = None
    async with aclosing(outputs):
        async for output in outputs:
            check_output(output)
            final = output
    if final is None:
        raise APIError(500, "the engine gave no output for this request")
    return final


async def merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the stream, output) as they come. Closing it closes all streams; the first failure ends all."""
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
                continue
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
