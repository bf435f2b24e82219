"""Servers on loopback: the real launcher, in a thread of the test process."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trivet.app.server.config import ServerConfig
from trivet.app.server.launcher import bind, describe_address, make_server

_SPEC = importlib.util.spec_from_file_location("fake_engine", Path(__file__).with_name("fake_engine.py"))
assert _SPEC is not None and _SPEC.loader is not None
fake_engine = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_engine"] = fake_engine
_SPEC.loader.exec_module(fake_engine)


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str  # http://127.0.0.1:PORT
    engine: Any
    loop: asyncio.AbstractEventLoop


@contextmanager
def running_server(engine: Any, **settings: Any) -> Iterator[RunningServer]:
    defaults: dict[str, Any] = {"port": 0, "served_model_names": ("fake",), "model_path": "fake"}
    config = ServerConfig(**defaults | {"uvicorn_log_level": "warning"} | settings)
    listener = bind(config)
    ready = threading.Event()
    server = make_server(engine, config, on_ready=ready.set)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(sockets=[listener])))
    thread.start()
    try:
        assert ready.wait(10)
        yield RunningServer(describe_address(config, listener), engine, loop)
    finally:
        server.should_exit = True
        thread.join(10)
        server.force_exit = True
        thread.join(10)
        assert not thread.is_alive()
        loop.close()


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """start_server(engine=None, **ServerConfig fields) -> RunningServer; stopped at the end of the test."""
    with ExitStack() as stack:

        def start(engine: Any = None, **settings: Any) -> RunningServer:
            chosen = fake_engine.FakeEngine() if engine is None else engine
            return stack.enter_context(running_server(chosen, **settings))

        yield start


@pytest.fixture(scope="session")
def _shared_server() -> Iterator[RunningServer]:
    with running_server(fake_engine.FakeEngine()) as running:
        yield running


@pytest.fixture
def server(_shared_server: RunningServer) -> RunningServer:
    """A server with default settings; one for all tests, its engine as new."""
    _shared_server.engine.reset()
    return _shared_server
