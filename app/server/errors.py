"""Errors as clients see them: an HTTP status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ...runtime.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger("trivet.server")

_LINGER_SECONDS = 5.0  # in all
_LINGER_IDLE_SECONDS = 1.0  # without a byte

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class APIError(Exception):
    """A request that is refused or failed. `param`: the field at fault, where one is."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, http.HTTPStatus(self.status).phrase.replace(" ", "") + "Error"),
                "param": self.param,
                "code": self.status,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


class BodyTooLargeError(APIError):
    """The rest of the body is read and dropped for a while after the answer.

    Closing at once would reset the connection, and a client that is still sending would never see the answer.
    """

    def response(self) -> JSONResponse:
        return _LingeringResponse(self.body(), status_code=self.status, headers=self.headers)


class _LingeringResponse(JSONResponse):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": bytes(self.body), "more_body": True})
        # Reading on would tell a client that waits for "100 Continue" to send.
        if "expect" not in Headers(scope=scope):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_SECONDS):
                    while (await asyncio.wait_for(receive(), _LINGER_IDLE_SECONDS)).get("more_body"):
                        pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def bad_request(message: str, param: str | None = None) -> APIError:
    return APIError(400, message, param=param)


def as_api_error(error: BaseException) -> APIError:
    """The APIError for anything that a handler or the engine raises; unexpected ones are logged with a traceback."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, InvalidRequestError):
        return bad_request(str(error))
    if isinstance(error, EngineDeadError):
        return APIError(503, f"the engine has stopped: {error}")
    if isinstance(error, RequestValidationError):  # of a query: bodies are read by hand
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return bad_request(f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}", name)
    if isinstance(error, HTTPException):
        return APIError(error.status_code, _http_message(error), headers=error.headers)
    logger.error("request failed", exc_info=error)
    return APIError(500, f"internal error: {type(error).__name__}")


def _http_message(error: HTTPException) -> str:
    if error.status_code == 404:
        return "there is nothing at this path; GET /v1/models lists the models"
    if error.status_code == 405:
        return f"this path takes {(error.headers or {}).get('Allow', 'another method')}"
    return str(error.detail)


async def handle_error(request: Request, error: Exception) -> Response:
    """Exception handler of the whole application."""
    del request
    return as_api_error(error).response()
