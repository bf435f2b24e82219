"""HTTP itself: streams, disconnects, keys, health, signals."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import REPLY, FakeEngine
from starlette.applications import Starlette
from starlette.routing import Mount
from trivet.app.server import launcher
from trivet.app.server.app import build_app
from trivet.app.server.config import ServerConfig
from trivet.app.server.launcher import AddressError, bind

from .http_client import CHAT_PATH, CLIENT, COMPLETION_PATH, HELLO, message, request_head


def wait_until(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


# --- discovery ----------------------------------------------------------------------------------------------------
def test_health_version_ping_load(server: Any) -> None:
    from trivet import __version__

    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = CLIENT.request(method, server.url + path)
        assert (response.status_code, response.content) == (200, b"")
    assert CLIENT.get(server.url + "/version").json() == {"version": __version__}
    assert CLIENT.get(server.url + "/load").json() == {"server_load": 0}
    detail = {"status": "ok", "device": "cpu", "stats": {"num_requests_running": 0}}
    assert CLIENT.get(server.url + "/health?detail=1").json() == detail
    response = CLIENT.get(server.url + "/health?detail=some")
    assert response.status_code == 400 and response.json()["error"]["param"] == "detail"
    assert "detail: input should be a valid boolean, " in response.json()["error"]["message"]
    server.engine.dead = True
    response = CLIENT.get(server.url + "/health?detail=1")
    assert (response.status_code, response.json()) == (503, detail | {"status": "dead"})
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert CLIENT.request(method, server.url + path).status_code == 503
    response = CLIENT.post(server.url + CHAT_PATH, json=HELLO)
    assert response.status_code == 503 and "killed by the test" in message(response)


def test_load_counts_when_asked_to(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(delay_s=0.05), enable_server_load_tracking=True)
    with CLIENT.stream("POST", server.url + CHAT_PATH, json={**HELLO, "stream": True}):
        assert CLIENT.get(server.url + "/load").json() == {"server_load": 1}
    wait_until(lambda: CLIENT.get(server.url + "/load").json() == {"server_load": 0})


def test_keys_guard_v1_only(start_server: Callable[..., Any]) -> None:
    server = start_server(api_keys=("secret",))
    assert CLIENT.get(server.url + "/health").status_code == 200
    for headers in ({}, {"Authorization": "secret"}, {"Authorization": "Bearer Secret"}, {"Authorization": "Bearer é"}):
        raw = {key.encode(): value.encode() for key, value in headers.items()}
        response = CLIENT.post(server.url + CHAT_PATH, json=HELLO, headers=raw)
        assert response.status_code == 401 and response.json()["error"]["type"] == "AuthenticationError"
    headers = {"Authorization": "Bearer secret"}
    assert CLIENT.post(server.url + CHAT_PATH, json=HELLO, headers=headers).status_code == 200


def test_keys_guard_v1_behind_a_path_prefix(start_server: Callable[..., Any]) -> None:
    server = start_server(
        FakeEngine(delay_s=0.05), api_keys=("secret",), root_path="/api", enable_server_load_tracking=True
    )
    key = {"Authorization": "Bearer secret"}
    assert CLIENT.get(server.url + "/v1/models").status_code == 401
    assert CLIENT.get(server.url + "/v1/models", headers=key).status_code == 200
    assert CLIENT.get(server.url + "/api/v1/models").status_code != 200  # the proxy has not stripped its prefix
    with CLIENT.stream("POST", server.url + CHAT_PATH, json={**HELLO, "stream": True}, headers=key):
        assert CLIENT.get(server.url + "/load").json() == {"server_load": 1}


def test_keys_guard_v1_of_an_app_that_is_mounted_in_another() -> None:
    config = ServerConfig(served_model_names=("fake",), model_path="fake", api_keys=("secret",))
    inner = build_app(FakeEngine(), config)
    outer = Starlette(routes=[Mount("/llm", app=inner)])

    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(app=outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://outer") as client:
            headers: list[dict[str, str]] = [{}, {"Authorization": "Bearer secret"}]
            return [(await client.get("/llm/v1/models", headers=h)).status_code for h in headers]

    assert asyncio.run(statuses()) == [401, 200]


def test_request_id_headers(start_server: Callable[..., Any]) -> None:
    server = start_server(enable_request_id_headers=True)
    assert CLIENT.get(server.url + "/health", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    assert len(CLIENT.get(server.url + "/health").headers["x-request-id"]) == 32


def test_cors_only_when_asked_for(server: Any, start_server: Callable[..., Any]) -> None:
    headers = {"Origin": "http://page.test"}
    assert "access-control-allow-origin" not in CLIENT.get(server.url + "/health", headers=headers).headers
    open_server = start_server(allowed_origins=("*",))
    assert CLIENT.get(open_server.url + "/health", headers=headers).headers["access-control-allow-origin"] == "*"


# --- streams ------------------------------------------------------------------------------------------------------
def test_raw_stream(server: Any) -> None:
    with CLIENT.stream("POST", server.url + CHAT_PATH, json={**HELLO, "stream": True}) as response:
        raw = b"".join(response.iter_raw())
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    events = raw.decode().split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == REPLY
    assert all(set(chunk) == {"id", "object", "created", "model", "choices"} for chunk in chunks)


def test_events_arrive_one_by_one(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(delay_s=0.05))
    times = []
    with CLIENT.stream("POST", server.url + COMPLETION_PATH, json={"prompt": "a", "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert sum(gap > 0.02 for gap in gaps) >= len(gaps) - 2  # not in one batch at the end


def test_no_delay_on_accepted_sockets(start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    seen = []
    original = H11Protocol.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        original(self, transport)
        connection = transport.get_extra_info("socket")
        seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(H11Protocol, "connection_made", connection_made)
    CLIENT.get(start_server().url + "/health")
    assert seen and all(seen)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts(start_server: Callable[..., Any], path: str, stream: bool) -> None:
    server = start_server(FakeEngine(delay_s=1.0))
    body = {**(HELLO if path == CHAT_PATH else {"prompt": ["a", "b"]}), "stream": stream}
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request_head(path, len(data)) + data)
        wait_until(lambda: bool(server.engine.running))
        count = len(server.engine.running)
        if stream:
            connection.settimeout(5)
            connection.recv(100)
    wait_until(lambda: not server.engine.running, seconds=0.8)  # before the next token
    assert len(server.engine.aborted) == count


def test_half_of_many_streams_leave(start_server: Callable[..., Any]) -> None:
    import asyncio

    server = start_server(FakeEngine(delay_s=0.05))

    async def ask(client: httpx.AsyncClient, leaves: bool) -> str:
        text = ""
        async with client.stream("POST", server.url + CHAT_PATH, json={**HELLO, "stream": True}) as response:
            async for line in response.aiter_lines():
                if leaves and text:
                    return ""
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        return text

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=30) as client:
            tasks = [asyncio.create_task(ask(client, leaves=i % 2 == 0)) for i in range(64)]
            await asyncio.sleep(0.05)
            assert (await client.get(server.url + "/health")).status_code == 200
            assert not all(task.done() for task in tasks)  # they do not hold up others
            return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == ["", REPLY] * 32
    wait_until(lambda: not server.engine.running)


# --- addresses ----------------------------------------------------------------------------------------------------
def config(**settings: Any) -> ServerConfig:
    return ServerConfig(served_model_names=("fake",), model_path="fake", **settings)


def test_port_in_use() -> None:
    with bind(config(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"port {port}: Address already in use; choose another"):
            bind(config(port=port))


def test_unknown_host() -> None:
    with pytest.raises(AddressError, match=r"cannot listen on 203\.0\.113\.1"):
        bind(config(host="203.0.113.1", port=0))


@pytest.mark.parametrize("first_request", [False, True])
def test_a_request_head_that_comes_too_slowly_ends_the_connection(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, first_request: bool
) -> None:
    monkeypatch.setattr(launcher, "HEAD_SECONDS", 0.5)
    server = start_server(FakeEngine(delay_s=0.08))  # an answer takes longer than a head may
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        if first_request:
            body = json.dumps(HELLO).encode()
            connection.sendall(request_head(CHAT_PATH, len(body)) + body)
            answer = b""
            while b"ready" not in answer:
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
        received = b""
        for byte in itertools.chain(b"GET /health HTTP/1.1\r\n", itertools.repeat(ord("x"), 500)):
            try:
                connection.sendall(bytes([byte]))
                connection.settimeout(0.02)
                received += (more := connection.recv(4096))
            except TimeoutError:
                continue
            except OSError:
                break
            if not more:
                break
        assert received.startswith(b"HTTP/1.1 408 ") and b"Connection: close" in received
    assert CLIENT.get(server.url + "/health").status_code == 200


def test_unix_socket(start_server: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "trivet.sock"
    start_server(uds=str(path))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        assert client.post("http://x" + CHAT_PATH, json=HELLO).status_code == 200
    with pytest.raises(AddressError, match="in use"):
        bind(config(uds=str(path)))


def test_https(start_server: Callable[..., Any], tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    try:
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed: it makes the certificate of this test")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    server = start_server(ssl_keyfile=key, ssl_certfile=certificate)
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=certificate)
    assert httpx.post(server.url + CHAT_PATH, json=HELLO, verify=context).status_code == 200


# --- signals ------------------------------------------------------------------------------------------------------
SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from fake_engine import FakeEngine
from trivet.app.server.config import ServerConfig
from trivet.app.server.launcher import bind, describe_address, serve
config = ServerConfig(port=0, served_model_names=("fake",), model_path="fake")
listener = bind(config)
address = describe_address(config, listener)
serve(FakeEngine(delay_s=0.05), config, listener, on_ready=lambda: print(address, flush=True))
print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [2, 15])
def test_a_signal_drains_and_exits_0(number: int) -> None:
    script = SCRIPT.format(folder=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    text = ""
    with CLIENT.stream("POST", url + COMPLETION_PATH, json={"prompt": "a", "stream": True}) as response:
        for count, line in enumerate(response.iter_lines()):
            if count == 2:
                process.send_signal(number)
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == REPLY
    out, err = process.communicate(timeout=10)
    assert out == "ended\n" and process.returncode == 0, err
    assert "Traceback" not in err
