"""A server that answers by a script: known delays, known tokens; and the modules of bench/."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@dataclass(slots=True)
class ScriptedServer:
    """Streams `num_tokens` words: the first after `ttft`, the others `gap` seconds apart."""

    ttft: float = 0.05
    gap: float = 0.01
    num_tokens: int = 6
    sends_usage: bool = True
    status: int = 200
    models_status: int = 200
    breaks_after: int | None = None  # close the connection after so many words
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._answer(reader, writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        length = next((int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        if path == "/v1/models":
            self._send(writer, self.models_status, json.dumps({"data": [{"id": "scripted"}]}))
            return
        self.paths.append(path)
        self.bodies.append(body)
        if self.status != 200:
            self._send(writer, self.status, '{"error": {"message": "no such luck"}}')
            return
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        await self._stream(writer, "messages" in body)
        self.running -= 1

    async def _stream(self, writer: asyncio.StreamWriter, chat: bool) -> None:
        def event(value: Any) -> None:
            writer.write(f"data: {json.dumps(value)}\n\n".encode())

        if chat:
            event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for index in range(self.num_tokens):
            if index == self.breaks_after:
                return
            await asyncio.sleep(self.ttft if index == 0 else self.gap)
            text = {"delta": {"content": f"w{index} "}} if chat else {"text": f"w{index} "}
            event({"choices": [{"index": 0, **text, "finish_reason": None}]})
            await writer.drain()
        event({"choices": [{"index": 0, **({"delta": {}} if chat else {"text": ""}), "finish_reason": "length"}]})
        if self.sends_usage:
            details = {"prompt_tokens_details": {"cached_tokens": 3}}
            event({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 12, **details}})
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    def _send(self, writer: asyncio.StreamWriter, status: int, body: str) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


@pytest.fixture
def scripted_server() -> Iterator[Callable[..., ScriptedServer]]:
    """scripted_server(**script) -> a running server."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def start(**script: Any) -> ScriptedServer:
        scripted = ScriptedServer(**script)
        listening = asyncio.start_server(scripted.handle, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(listening, loop).result(10)
        scripted.port = server.sockets[0].getsockname()[1]
        return scripted

    yield start
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """load("growth") -> bench/growth.py, as its own process sees it."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]
