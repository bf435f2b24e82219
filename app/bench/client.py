"""A streaming client of any OpenAI-compatible server, which notes when text arrives."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from ..cli.errors import CliError
from .datasets import SampleRequest
from .metrics import RequestRecord

if TYPE_CHECKING:
    import httpx

ENDPOINTS: Final = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what every one of them asks for."""

    base_url: str
    endpoint: str
    chat: bool
    model: str
    sampling: Mapping[str, Any]  # temperature, ignore_eos, ..., by their names on the wire

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + self.endpoint


def open_client(base_url: str, headers: Mapping[str, str], timeout: float | None) -> httpx.AsyncClient:
    """As many connections as there are requests. CliError when httpx is not installed."""
    try:
        import httpx
    except ImportError as error:
        raise CliError("`trivet bench serve` needs the package httpx: pip install httpx") from error
    loopback = urlsplit(base_url).hostname in ("localhost", "127.0.0.1", "::1")
    return httpx.AsyncClient(
        headers=dict(headers),
        timeout=httpx.Timeout(timeout),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=not loopback,  # a proxy of the environment cannot know our loopback
    )


async def first_model(client: httpx.AsyncClient, base_url: str) -> str:
    """The first name in the server's list of models. CliError when it cannot be had."""
    import httpx

    url = base_url.rstrip("/") + "/v1/models"
    try:
        response = await client.get(url)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        hint = "the API key is missing or wrong (OPENAI_API_KEY)" if status == 401 else "name a model with --model"
        raise CliError(f"{url} answers with status {status}; {hint}") from error
    except httpx.HTTPError as error:
        raise CliError(f"no model list at {url} ({error}); start a server, or give --base-url and --model") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CliError(f"{url} lists no model; name one with --model") from error


async def request_once(client: httpx.AsyncClient, target: Target, sample: SampleRequest) -> RequestRecord:
    """Send one request and follow its stream. What goes wrong is in the record's `error`."""
    import httpx

    record = RequestRecord(prompt_tokens=sample.prompt_len or 0, start=time.perf_counter())
    stream = _Stream(record)
    try:
        async with client.stream("POST", target.url, json=_body(target, sample)) as response:
            if response.status_code != 200:
                body = (await response.aread()).decode(errors="replace")
                record.error = f"HTTP {response.status_code}: {body[:500]}"
                return record
            async for line in response.aiter_lines():
                if line.startswith("data:") and not stream.take(line[5:].strip()):
                    break
    except (httpx.HTTPError, httpx.StreamError) as error:
        record.error = f"{type(error).__name__}: {error}"
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        record.error = f"not an OpenAI stream: {type(error).__name__}: {error}"
    stream.finish()
    return record


def _body(target: Target, sample: SampleRequest) -> dict[str, Any]:
    prompt: dict[str, Any]
    if target.chat:
        prompt = {"messages": [{"role": "user", "content": sample.text}]}
    else:
        prompt = {"prompt": sample.text if sample.token_ids is None else sample.token_ids}
    return {
        "model": target.model,
        **prompt,
        "max_tokens": sample.expected_output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.sampling,
    }


class _Stream:
    """The server-sent events of one answer."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._last = record.start
        self._num_chunks = 0
        self._done = False
        self._finished = False

    def take(self, payload: str) -> bool:
        """One event; False after the last one."""
        now = time.perf_counter()
        if payload == "[DONE]":
            self._done = True
            return False
        chunk = json.loads(payload)
        if "error" in chunk:
            self._record.error = f"the server failed: {chunk['error']}"
            return False
        for choice in chunk.get("choices") or ():
            self._take_text(_text(choice), now)
            self._finished = self._finished or choice.get("finish_reason") is not None
        if usage := chunk.get("usage"):
            self._record.prompt_tokens = int(usage["prompt_tokens"])
            self._record.completion_tokens = int(usage["completion_tokens"])
            self._record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self._record.counts_from = "usage"
        return True

    def _take_text(self, text: str, now: float) -> None:
        if not text:  # the role of a chat answer, or the end of an answer, is no token
            return
        record = self._record
        if self._num_chunks == 0:
            record.ttft = now - record.start
        else:
            record.itl.append(now - self._last)
        self._num_chunks += 1
        self._last = now
        record.latency = now - record.start
        record.text += text

    def finish(self) -> None:
        record = self._record
        if record.error is None and not (self._done or self._finished):
            record.error = "the stream ended without [DONE] and without a finish_reason"
        if record.error is None and self._num_chunks == 0:
            record.error = "the answer has no text"
        if record.counts_from != "usage":
            record.completion_tokens = self._num_chunks
            record.counts_from = "chunks"


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")
