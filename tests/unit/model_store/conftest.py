"""Stand-ins on loopback: a Hugging Face hub, and a package index; and wheels to put there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Files:
    """What the stand-in serves, and what it saw."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)  # "org/repo" -> name -> content
    wheels: dict[str, bytes] = field(default_factory=dict)  # file name -> content
    commit: str = COMMIT
    status: dict[str, int] = field(default_factory=dict)  # "org/repo" -> HTTP status of everything
    gated: set[str] = field(default_factory=set)
    lfs_sha256: dict[str, str] = field(default_factory=dict)  # file name -> what the hub claims
    bytes_per_s: int | None = None  # slows bodies down
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: Files

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.files.requests.append((self.command, path, self.headers.get("Range")))
        parts = path.strip("/").split("/")
        if parts[0] == "simple":
            return self._index(parts)
        if parts[0] == "wheels":
            return self._send(self.files.wheels[parts[1]])
        repository = "/".join(parts[2:4]) if parts[:2] == ["api", "models"] else "/".join(parts[:2])
        if repository not in self.files.repositories:
            return self._send(b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"})
        if repository in self.files.gated:
            return self._send(b"{}", status=403, headers={"X-Error-Code": "GatedRepo"})
        if status := self.files.status.get(repository):
            return self._send(b"{}", status=status)
        if parts[0] == "api":
            return self._send(json.dumps(self._info(repository)).encode(), kind="application/json")
        name = "/".join(parts[4:])
        content = self.files.repositories[repository].get(name)
        if content is None:
            return self._send(b"", status=404, headers={"X-Error-Code": "EntryNotFound"})
        return self._send(
            content, headers={"X-Repo-Commit": parts[3], "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        )

    def _info(self, repository: str) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.repositories[repository].items():
            sha256 = self.files.lfs_sha256.get(name, hashlib.sha256(content).hexdigest())
            large = name.endswith((".gguf", ".safetensors"))
            lfs = {"lfs": {"sha256": sha256, "size": len(content), "pointerSize": 100}} if large else {}
            siblings.append({"rfilename": name, "size": len(content), "blobId": "0" * 40, **lfs})
        return {"id": repository, "sha": self.files.commit, "siblings": siblings, "cardData": {"license": "mit"}}

    def _index(self, parts: list[str]) -> None:
        names = [name for name in self.files.wheels if name.split("-")[0].replace("_", "-") == parts[1]]
        links = "".join(f'<a href="/wheels/{name}">{name}</a>' for name in names)
        self._send(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), kind="text/html")

    def _send(
        self,
        content: bytes,
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
        kind: str = "application/octet-stream",
    ) -> None:
        span = self.headers.get("Range", "")
        start = int(span.removeprefix("bytes=").split("-")[0]) if span and status == 200 else 0
        self.send_response(206 if start else status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        rate = self.files.bytes_per_s if len(content) > 100_000 else None
        step = rate // 20 if rate else max(1, len(content))
        for position in range(start, len(content), step):
            try:
                self.wfile.write(content[position : position + step])
            except OSError:
                self.close_connection = True
                return
            if rate:
                time.sleep(0.05)


@pytest.fixture
def remote() -> Iterator[Files]:
    """A hub and an index on loopback."""
    files = Files()
    handler = type("Handler", (_Handler,), {"files": files})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        files.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield files
        server.shutdown()
        thread.join()


def make_wheel(name: str, version: str, members: dict[str, bytes]) -> bytes:
    """A wheel that pip accepts."""
    from io import BytesIO

    stem = f"{name.replace('-', '_')}-{version}"
    members = members | {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": b"",
    }
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return buffer.getvalue()


@pytest.fixture
def wheel(remote: Files) -> Callable[[str, str, dict[str, bytes]], None]:
    """wheel(name, version, {member: content}): put one on the index."""

    def put(name: str, version: str, members: dict[str, bytes]) -> None:
        remote.wheels[f"{name.replace('-', '_')}-{version}-py3-none-any.whl"] = make_wheel(name, version, members)

    return put


@dataclass(frozen=True)
class Cli:
    """Runs `trivet` as a user would, against the stand-ins."""

    environment: dict[str, str]
    home: Path

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "trivet", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment | environment,
        )

    def __call__(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def models(self) -> list[str]:
        """References in the store."""
        status, out, _ = self("list", "--json")
        assert status == 0
        return [model["reference"] for model in json.loads(out)]

    def leftovers(self) -> list[str]:
        """Files under the store that belong to no model."""
        store = self.home / "models"
        whole = [record.parent for record in store.glob("*/trivet-model.json")]
        return [
            str(path.relative_to(store))
            for path in store.rglob("*")
            if path.is_file() and path.suffix != ".lock" and path.parent not in whole
        ]


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool], subprocess.Popen[str]], None]:
    """wait_until(condition, process): poll until it holds; fails after 20 s, or when the process ends before."""

    def wait(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    return wait


@pytest.fixture
def cli(remote: Files, trivet_home: Path, tmp_path: Path) -> Cli:
    environment = {
        **{
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PIP_", "HF_", "NO_PROXY", "no_proxy"))
        },
        "TRIVET_HOME": str(trivet_home),
        "HF_ENDPOINT": remote.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"{remote.url}/simple",
        "NO_PROXY": "127.0.0.1",
    }
    return Cli(environment, trivet_home)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """small_disk(mount options) -> an own file system of a test; skips where none can be mounted."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("a small file system cannot be mounted here (needs root)")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
