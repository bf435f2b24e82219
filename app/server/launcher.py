"""Start the server: claim the address, load the model, serve until a signal, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging.config
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...runtime.errors import EngineDeadError, TrivetError
from .app import build_app
from .config import ServerConfig
from .openai.engine import Engine

_BACKLOG = 2048
_CUT_SECONDS = 5.0  # after a second signal, for requests to notice that their clients are gone
DEAD_SECONDS = 5.0  # from the death of the engine to the end of the server: /health says so meanwhile
HEAD_SECONDS = 30.0  # for a client to send a request's line and headers
_HEAD_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


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


def serve(
    engine: Engine,
    config: ServerConfig,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None],
    on_drain: Callable[[int, signal.Signals], None] = lambda num_answers, number: None,
) -> bool:
    """Serve on `listener` until SIGINT or SIGTERM; answers in progress are completed first. False: a second signal cut
    them off.

    `on_ready` is called when requests are answered, `on_drain` with the number of answers in progress, if there are
    any, and the signal after which they are completed. The engine stays the caller's to shut down. When it dies, the
    server ends with EngineDeadError, so that whoever supervises the process starts another.
    """
    server = make_server(engine, config, on_ready=on_ready, on_drain=on_drain)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        listener.close()
        if config.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(config.uds)
    engine.check_health()
    return not server.was_cut


def make_server(
    engine: Engine,
    config: ServerConfig,
    *,
    on_ready: Callable[[], None],
    on_drain: Callable[[int, signal.Signals], None] = lambda num_answers, number: None,
) -> Server:
    """The server itself, for programs with an event loop of their own; it ends when its `should_exit` is set."""
    return Server(_uvicorn_config(engine, config), engine, on_ready, on_drain)


def _uvicorn_config(engine: Engine, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(engine, config),
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=_log_config(config.uvicorn_log_level),
        access_log=not config.disable_uvicorn_access_log,
        server_header=False,
        root_path=config.root_path,
        h11_max_incomplete_event_size=config.h11_max_incomplete_event_size,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
    )


class _Protocol(H11Protocol):
    """uvicorn's protocol with a bound on the time that the head of a request takes."""

    _head_timer: asyncio.TimerHandle | None = None

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self.is_answering or self.transport.is_closing():
            self._stop_watching()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse_slow_head)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_slow_head(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_HEAD_TIMEOUT)
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server with our end: a signal asked for is a success, so it is not raised again afterwards, and there
    is no use in a server whose engine is dead."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: Engine,
        on_ready: Callable[[], None],
        on_drain: Callable[[int, signal.Signals], None],
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._died_at: float | None = None
        self._on_ready = on_ready
        self._on_drain = on_drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self.was_cut = False  # by a second signal

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
        if not self.should_exit or self._loop is None:
            super().handle_exit(sig, frame)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._tell_of_drain, signal.Signals(sig))
        elif not self.was_cut:
            self.was_cut = True
            self._loop.call_soon_threadsafe(self._cut_connections)
            self._loop.call_soon_threadsafe(self._loop.call_later, _CUT_SECONDS, self._stop_waiting)

    def _tell_of_drain(self, number: signal.Signals) -> None:
        connections = [each for each in self.server_state.connections if isinstance(each, _Protocol)]
        if num_answers := sum(each.is_answering for each in connections):
            self._on_drain(num_answers, number)

    def _cut_connections(self) -> None:
        """Drop all connections; their requests end as they do when clients leave. Again and again: some may be new."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        asyncio.get_running_loop().call_later(0.1, self._cut_connections)

    def _stop_waiting(self) -> None:
        self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """About ten times a second."""
        try:
            self._engine.check_health()
            self._died_at = None
        except EngineDeadError:
            now = time.monotonic()
            self._died_at = self._died_at or now
            self.should_exit |= now - self._died_at >= DEAD_SECONDS
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def configure_logging(config: ServerConfig) -> None:
    """From the first line on: what is said while the model loads matters, too."""
    logging.config.dictConfig(_log_config(config.uvicorn_log_level))


def _log_config(level: str) -> dict[str, Any]:
    """Everything on stderr: stdout is for data."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stderr"}},
        "loggers": {
            name: {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
            for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "trivet")
        },
    }
