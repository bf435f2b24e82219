"""Requests that the tests of the server send."""

from __future__ import annotations

import httpx

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CLIENT = httpx.Client(timeout=30)  # one: making a client costs a tenth of a second
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}


def request_head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}", "", "")
    return "\r\n".join(lines).encode()


def message(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])
