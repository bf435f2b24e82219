"""A --url whose scheme is not the server's."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Answer = Callable[[socket.socket], None]


def http_400(client: socket.socket) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def hang_up(client: socket.socket) -> None:
    client.recv(4096)


def tls_alert(client: socket.socket) -> None:
    client.recv(4096)
    client.sendall(b"\x15\x03\x03\x00\x02\x02\x28")  # fatal: handshake_failure


@pytest.fixture
def listening(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server that does to each connection what the test's parameter says."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    request.param(client)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("listening", [http_400], indirect=True)
def test_https_to_a_server_without_tls(cli: Any, listening: int) -> None:
    result = cli("chat", "--url", f"https://127.0.0.1:{listening}", "-q", "x")
    assert result.status == 1 and result.err.count("\n") == 1
    assert f"the server at https://127.0.0.1:{listening}/v1 does not speak TLS (" in result.err
    assert result.err.endswith(f"); try --url http://127.0.0.1:{listening}\n")


@pytest.mark.parametrize(("listening", "refused"), [(tls_alert, True), (hang_up, False)], indirect=["listening"])
def test_tls_that_fails_is_not_called_no_server(cli: Any, listening: int, refused: bool) -> None:
    result = cli("chat", "--url", f"https://127.0.0.1:{listening}/llm/v1", "-q", "x")
    assert result.status == 1 and result.err.startswith(
        f"trivet: error: no TLS connection to https://127.0.0.1:{listening}/llm/v1: [SSL: "
    )
    assert (
        result.err.endswith("; the server refused it: check the host name of --url, and the server's log\n") == refused
    )
    assert "http://" not in result.err


def test_a_server_with_tls(cli: Any, llama: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the certificate of this test")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=trivet",
               "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    with cli.serving(llama, "--ssl-keyfile", key, "--ssl-certfile", certificate) as (url, _):
        port = url.rsplit(":", 1)[1]
        unknown = cli("complete", "x", "--url", f"https://127.0.0.1:{port}")
        assert unknown.status == 1 and "certificate verify failed" in unknown.err and "no server" not in unknown.err
        assert unknown.err.endswith("; SSL_CERT_FILE names a file of certificates to trust\n")
        misnamed = cli("complete", "x", "--url", f"https://localhost:{port}", SSL_CERT_FILE=str(certificate))
        assert misnamed.status == 1 and "not valid for 'localhost'" in misnamed.err
        assert "SSL_CERT_FILE" not in misnamed.err
        plain = cli("complete", "x", "--url", f"http://127.0.0.1:{port}")
        assert plain.status == 1 and f"if the server speaks TLS, try --url https://127.0.0.1:{port}" in plain.err
        answered = cli("complete", "x", "--url", f"https://127.0.0.1:{port}", SSL_CERT_FILE=str(certificate))
        assert answered.status == 0, answered.err
