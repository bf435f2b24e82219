"""ASGI middleware: API keys, request ids, server load."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import APIError

_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def route_path(scope: Scope) -> str:
    """The path as the routes see it: without the prefix of --root-path, which the ASGI server puts in front."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


class APIKeyMiddleware:
    """Refuses requests to /v1 without one of the keys (401). Health and version stay open, as in vLLM."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["method"] != "OPTIONS"
        if guarded and route_path(scope).startswith("/v1") and not self._allows(Headers(scope=scope)):
            error = APIError(
                401,
                "the API key is missing or wrong: send `Authorization: Bearer KEY`",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip().encode("latin-1")
        # Every key is compared, in constant time, so that the time tells nothing about them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class HeaderCountMiddleware:
    """Refuses requests with more headers than allowed (431); uvicorn bounds only their bytes."""

    def __init__(self, app: ASGIApp, max_count: int) -> None:
        self._app = app
        self._max_count = max_count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["headers"]) > self._max_count:
            error = APIError(
                431,
                f"the request has {len(scope['headers'])} headers, at most {self._max_count} are accepted",
                headers={"Connection": "close"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


class RequestIdMiddleware:
    """Answers with the request's X-Request-Id, or one made up (`--enable-request-id-headers`)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class LoadTracker:
    """Counts requests to the generating routes that are in progress (`--enable-server-load-tracking`)."""

    def __init__(self, app: ASGIApp, paths: Sequence[str], counter: LoadCounter) -> None:
        self._app = app
        self._paths = set(paths)
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        self._counter.value += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._counter.value -= 1


class LoadCounter:
    """Requests in progress; read by GET /load."""

    def __init__(self) -> None:
        self.value = 0
