"""Answers that end when the client leaves: JSON computed under watch, and server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .errors import as_api_error

T = TypeVar("T")

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # reverse proxies hand every event on at once
]


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, cancelled the moment the client leaves (ClientGone). The body must have been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watcher.cancel()
        task.cancel()
        with suppress(BaseException):
            await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_json(request: Request, work: Awaitable[Response]) -> Response:
    """The response of `work`; nothing is sent to a client that left, and what `work` asked of the engine is aborted."""
    try:
        return await until_disconnect(request.receive, work)
    except ClientGone:
        return _Nothing()


class _Nothing(Response):
    """Sends nothing: the connection is closed already."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


class EventStream(Response):
    """Server-sent events, one flush each, from a generator of `data:` payloads.

    The status line waits for the first payload: what fails before it is an ordinary JSON error. Later failures become
    an error event. The generator is closed when the client leaves.
    """

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await until_disconnect(receive, self._produce(scope, receive, send))

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                first = await anext(self._events)
            except Exception as error:
                await as_api_error(error).response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
            await send(_event(first))
            try:
                async for payload in self._events:
                    await send(_event(payload))
            except Exception as error:
                await send(_event(json.dumps(as_api_error(error).body())))
            await send(_event("[DONE]"))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


def _event(payload: str) -> Message:
    return {"type": "http.response.body", "body": f"data: {payload}\n\n".encode(), "more_body": True}
