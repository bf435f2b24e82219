"""`trivet` as a user starts it: a process with an empty cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TRIVET = [sys.executable, "-m", "trivet"]


@dataclass(frozen=True, slots=True)
class Result:
    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs commands; `home` is shared by the tests of a session so that models are exported once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._started: list[subprocess.Popen[str]] = []
        self.environment = {**os.environ, "TRIVET_HOME": str(home), "NO_PROXY": "127.0.0.1,localhost"}

    def start(self, *arguments: Any, **settings: Any) -> subprocess.Popen[str]:
        """A command in the background, ended with the test at the latest."""
        process = self._spawn(*arguments, **settings)
        self._started.append(process)
        return process

    def end_started(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        self._started.clear()

    def _spawn(self, *arguments: Any, **settings: Any) -> subprocess.Popen[str]:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": self.environment} | settings
        command = [*TRIVET, *map(str, arguments)]
        process: subprocess.Popen[str] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
        return process

    def __call__(
        self, *arguments: Any, stdin: str | None = None, cwd: Path | None = None, **environment: str
    ) -> Result:
        done = subprocess.run(
            [*TRIVET, *map(str, arguments)],
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=cwd,
            env=self.environment | environment,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def serving(self, *arguments: Any, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
        """`trivet serve` on a free port: (URL, process)."""
        process = self._spawn("serve", *arguments, "--port", 0, env=self.environment | environment)
        assert process.stderr is not None
        lines: list[str] = []
        try:
            for line in process.stderr:
                lines.append(line)
                if line.startswith("Serving "):
                    yield line.split(" on ")[1].split()[0], process
                    break
            else:
                pytest.fail("the server did not start: " + "".join(lines))
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test(cli: Cli) -> Iterator[None]:
    yield
    cli.end_started()


@pytest.fixture(scope="session")
def llama(tiny: Callable[..., Path]) -> Path:
    """A tiny model with a chat template."""
    return tiny("llama", "safetensors")


@pytest.fixture(scope="session")
def base_model(tiny: Callable[..., Path]) -> Path:
    """A tiny model without a chat template."""
    return tiny("gemma3", "safetensors")
