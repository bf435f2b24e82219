"""Shared fixtures: tiny checkpoints, real models from the test cache, an own TRIVET_HOME, no network but loopback."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# Started in the background by a shell without job control, this process and its children would ignore ^C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_own_home = pytest.StashKey[str]()


class NetworkBlockedError(RuntimeError):
    """A test tried to leave this machine."""


def _refuse_non_loopback(address: Any) -> None:
    if not isinstance(address, tuple):  # a Unix socket
        return
    host = str(address[0])
    try:
        loopback = ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        loopback = host in ("", "localhost")
    if not loopback:
        raise NetworkBlockedError(f"tests may reach loopback only, not {address}")


def _guard_sockets() -> None:
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def guarded_connect(self: socket.socket, address: Any, /) -> None:
        _refuse_non_loopback(address)
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any, /) -> int:
        _refuse_non_loopback(address)
        return connect_ex(self, address)

    socket.socket.connect = guarded_connect  # type: ignore[method-assign,assignment]
    socket.socket.connect_ex = guarded_connect_ex  # type: ignore[method-assign,assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Nothing a test stores outlives the run: caches go to a folder of this process."""
    home = tempfile.mkdtemp(prefix="trivet-home-")
    config.stash[_own_home] = home
    os.environ["TRIVET_HOME"] = home
    os.environ["HF_HOME"] = os.path.join(home, "huggingface")
    os.environ["HF_HUB_CACHE"] = os.path.join(home, "huggingface", "hub")
    _guard_sockets()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_own_home], ignore_errors=True)


# --- tiny checkpoints ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """tiny(name, checkpoint_format) -> path, written once per session. See tools/tiny_checkpoints.py for both names."""
    from tiny_checkpoints import write

    folder = tmp_path_factory.mktemp("tiny")
    made: dict[tuple[str, str], Path] = {}

    def get(name: str, checkpoint_format: str = "safetensors") -> Path:
        key = (name, checkpoint_format)
        if key not in made:
            made[key] = write(name, checkpoint_format, folder)
        return made[key]

    return get


@pytest.fixture(scope="session")
def reference() -> Callable[[str], dict[str, Any]]:
    """reference(name) -> what transformers answered on that tiny model (see tools/record_references.py)."""

    def get(name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((TESTS / "data" / "references" / f"{name}.json").read_text())
        return loaded

    return get


# --- real models ---------------------------------------------------------------------------------------------------
def models_dir() -> Path:
    return Path(os.environ.get("TRIVET_TEST_MODELS") or Path.home() / ".cache" / "trivet-tests" / "models")


def _model_file(name: str) -> Path:
    items = json.loads((TESTS / "tools" / "models.json").read_text())
    return models_dir() / str(items[name]["out"])


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1, the one real model of the default run; fetched into the test cache when missing."""
    path = _model_file("smollm2-135m")
    if path.is_file():
        return path
    folder = models_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".fetch-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the parallel test processes fetches, the others wait
        command = [sys.executable, str(TESTS / "tools" / "fetch_models.py"), "--dir", str(folder), "smollm2-135m"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not path.is_file():
        pytest.skip(f"SmolLM2 is not in {folder} and cannot be fetched: {(done.stdout + done.stderr).strip()[-300:]}")
    return path


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """real_model(name of tools/models.json) -> path; skips when the test cache lacks it (fetch_models.py brings it)."""

    def get(name: str) -> Path:
        path = _model_file(name)
        if not path.exists():
            pytest.skip(f"{name} is not in the test cache: run tests/tools/fetch_models.py --dir {path.parent} {name}")
        return path

    return get


@pytest.fixture
def trivet_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty TRIVET_HOME for this test alone, also for the processes it starts."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("TRIVET_HOME", str(home))
    yield home
