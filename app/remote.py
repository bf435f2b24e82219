"""A session with an OpenAI-compatible server, over the standard library's HTTP client."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any, cast

from ..runtime.errors import TrivetError
from .session import Delta, Message, Usage

_CONNECT_TIMEOUT_S = 600  # a first token may take long; ^C ends the wait
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")  # of OpenSSL
_UNKNOWN_ISSUER = (18, 19, 20, 21)  # OpenSSL's X509_V_ERR_ for a chain that ends in no trusted certificate


class RemoteError(TrivetError):
    """The server could not be reached, or refused."""


class RemoteSession:
    """Talks to `{url}/chat/completions` and `{url}/completions`."""

    has_chat_template = True  # the server knows

    def __init__(self, url: str, *, api_key: str, model_name: str | None) -> None:
        """A `url` without a path means its /v1.

        RemoteError when no model name is given and the server's list cannot be had.
        """
        self._given_url = url
        self._url = url.rstrip("/")
        parts = _server_address(self._url)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        if not parts.path:
            self._url += "/v1"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        loopback = parts.hostname in ("localhost", "127.0.0.1", "::1")
        # A proxy of the environment cannot know our loopback.
        handlers = [urllib.request.ProxyHandler({})] if loopback else []
        self._opener = urllib.request.build_opener(*handlers)
        self.model_name = model_name or self._first_model()

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Generator[Delta, None, None]:
        yield from self._stream("/chat/completions", {"messages": list(messages)}, options)

    def complete(self, prompt: str, options: Mapping[str, Any]) -> Generator[Delta, None, None]:
        yield from self._stream("/completions", {"prompt": prompt}, options)

    def close(self) -> None:
        return

    def _first_model(self) -> str:
        with self._open("/models", None) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise RemoteError(f"{self._url}/models lists no model; name one with --model-name") from error

    def _stream(self, path: str, body: Mapping[str, Any], options: Mapping[str, Any]) -> Generator[Delta, None, None]:
        request = {
            "model": self.model_name,
            **body,
            **options,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._open(path, request) as response:
            try:
                for line in response:
                    if line.startswith(b"data:"):
                        payload = line.removeprefix(b"data:").strip()
                        if payload == b"[DONE]":
                            return
                        yield _parse_chunk(payload)
            except (OSError, HTTPException) as error:
                raise RemoteError(f"the connection to {self._url} broke: {error}") from error
        raise RemoteError(f"{self._url} ended the answer early")

    def _open(self, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers)
        try:
            return cast(HTTPResponse, self._opener.open(request, timeout=_CONNECT_TIMEOUT_S))
        except urllib.error.HTTPError as error:
            hint = " (--api-key or OPENAI_API_KEY)" if error.code == 401 else ""
            if error.code == 404 and not self._url.endswith("/v1"):
                hint = f" (most servers want --url {self._origin}/v1)"
            raise RemoteError(f"{self._url}{path} answered {error.code}: {_error_message(error)}{hint}") from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise RemoteError(self._describe_failure(reason)) from error

    def _describe_failure(self, reason: object) -> str:
        """Why there is no HTTP response, and what may help: `reason` came up while connecting, or instead of one."""
        import ssl

        scheme, _, rest = self._given_url.partition("://")
        if isinstance(reason, ssl.SSLError):
            if reason.reason in _NOT_TLS:
                return f"the server at {self._url} does not speak TLS ({reason}); try --url http://{rest}"
            hint = ""
            if isinstance(reason, ssl.SSLCertVerificationError) and reason.verify_code in _UNKNOWN_ISSUER:
                hint = "; SSL_CERT_FILE names a file of certificates to trust"
            elif "ALERT" in str(reason):
                hint = "; the server refused it: check the host name of --url, and the server's log"
            return f"no TLS connection to {self._url}: {reason}{hint}"
        if isinstance(reason, HTTPException | ConnectionResetError) and scheme.lower() == "http":
            return f"no HTTP response from {self._url} ({reason}); if the server speaks TLS, try --url https://{rest}"
        return f"no server answers at {self._url} ({reason}); start one with `trivet serve`, or give another --url"


def _server_address(url: str) -> urllib.parse.SplitResult:
    """The parts of the URL of a server's API. RemoteError where one of them would not be honoured."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:  # brackets that hold no address
        raise RemoteError(f"{url!r} is not a server's URL: {error}") from error
    if url and parts.scheme not in ("http", "https") and not any(mark in url for mark in ("://", "@", " ")):
        with_scheme = f"http://{url.lstrip('/')}" + ("" if "/" in url.lstrip("/") else "/v1")
        raise RemoteError(f"{url!r} is not a server's URL: it has no scheme; did you mean {with_scheme}?")
    if parts.scheme not in ("http", "https") or not parts.hostname or " " in url:
        raise RemoteError(f"{url!r} is not a server's URL; expected one like http://localhost:8000/v1")
    try:
        _ = parts.port
    except ValueError as error:  # a larger one would reach another port
        raise RemoteError(f"{url!r} has no valid port ({error}); expected one from 0 to 65535") from error
    if "@" in parts.netloc:
        raise RemoteError("the server's URL has a user name; expected one without, and a key in --api-key")
    if parts.query or parts.fragment:
        raise RemoteError(f"{url!r} has a query or a fragment; expected a URL like http://localhost:8000/v1")
    return parts


def _parse_chunk(payload: bytes) -> Delta:
    try:
        chunk = json.loads(payload)
    except ValueError as error:
        raise RemoteError(f"the server sent something that is not JSON: {payload[:80]!r}") from error
    try:
        return _to_delta(chunk)
    except (LookupError, TypeError, AttributeError) as error:
        raise RemoteError(f"the server sent something that is no part of an answer: {payload[:80]!r}") from error


def _to_delta(chunk: Any) -> Delta:
    if error := chunk.get("error"):
        raise RemoteError(f"the server failed: {error.get('message', error) if isinstance(error, dict) else error}")
    counts = _usage(chunk["usage"]) if chunk.get("usage") else None
    if not chunk.get("choices"):
        return Delta("", None, counts)
    choice = chunk["choices"][0]
    text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
    return Delta(text or "", choice.get("finish_reason"), counts, tuple(chunk.get("warnings") or ()))


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens"))


def _error_message(error: urllib.error.HTTPError) -> str:
    body = error.read(65536)
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace").strip()[:200] or str(error.reason)
