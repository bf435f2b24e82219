"""Start the server: claim the address, load the model, serve until a signal, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from ...runtime.errors import TrivetError
from .app import build_app
from .config import ServerConfig
from .openai.engine import Engine

_BACKLOG = 2048


class AddressError(TrivetError):
    """The address to listen on cannot be used."""


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket on the configured address; AddressError says why there is none.

    It listens at once, so that nobody else gets the address while the model loads: clients that connect meanwhile are
    answered as soon as the server is ready.
    """
    if config.uds is not None:
        return _bind_unix(config.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressError(f"cannot listen on {config.host}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressError(
            f"cannot listen on {config.host} port {config.port}: {os.strerror(error.errno or 0)}; "
            "choose another with --port, or --port 0 for any free one"
        ) from error
    return listener


def _bind_unix(path: str) -> socket.socket:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
            os.unlink(path)  # left by a server that was killed
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressError(f"cannot listen on the socket {path}: {os.strerror(error.errno or 0)}") from error
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def describe_address(config: ServerConfig, listener: socket.socket) -> str:
    """Where clients connect, as a URL."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    scheme = "https" if config.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def serve(engine: Engine, config: ServerConfig, listener: socket.socket, *, on_ready: Callable[[], None]) -> None:
    """Serve on `listener` until SIGINT or SIGTERM; answers in progress are completed first (a second signal cuts them).

    `on_ready` is called when requests are answered. The engine stays the caller's to shut down.
    """
    try:
        asyncio.run(make_server(engine, config, on_ready=on_ready).serve(sockets=[listener]))
    finally:
        listener.close()
        if config.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(config.uds)


def make_server(engine: Engine, config: ServerConfig, *, on_ready: Callable[[], None]) -> uvicorn.Server:
    """The server itself, for programs with an event loop of their own; it ends when its `should_exit` is set."""
    return _Server(_uvicorn_config(engine, config), on_ready)


def _uvicorn_config(engine: Engine, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(engine, config),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=_log_config(config.uvicorn_log_level),
        access_log=not config.disable_uvicorn_access_log,
        server_header=False,
        h11_max_incomplete_event_size=config.h11_max_incomplete_event_size,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
    )


class _Server(uvicorn.Server):
    """uvicorn's server with our end: a signal asked for is a success, so it is not raised again afterwards."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """First signal: no new connections, complete what runs. Second: cut it."""
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def _log_config(level: str) -> dict[str, Any]:
    """Everything on stderr: stdout is for data."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stderr"}},
        "loggers": {
            name: {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
            for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "trivet.server")
        },
    }
