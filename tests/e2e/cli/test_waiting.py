"""A process that waits for another one's export or download says so."""

from __future__ import annotations

import fcntl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINE = "waiting for another process that "


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return next((line for line in process.stderr if line.startswith(LINE)), "")


def test_an_export(cli: Any, tiny: Callable[[str, str], Path], trivet_home: Path) -> None:
    weights = tiny("llama", "gguf-q8_0")
    with weights.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        started = time.monotonic()
        process = cli.start(
            "run", "x", "-m", weights, "--max-tokens", 2, env=cli.environment | {"TRIVET_HOME": str(trivet_home)}
        )
        assert line_of(process) == f"{LINE}prepares {weights}\n"
        assert time.monotonic() - started > 1 and process.poll() is None
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out and LINE not in err
    assert LINE not in cli("run", "x", "-m", weights, "--max-tokens", 2, TRIVET_HOME=str(trivet_home)).err


def test_a_download(cli: Any, trivet_home: Path) -> None:
    incoming = trivet_home / "models" / ".incoming"
    incoming.mkdir(parents=True)
    with (incoming / "hf@org+repo.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        environment = cli.environment | {"TRIVET_HOME": str(trivet_home), "HF_ENDPOINT": "http://127.0.0.1:9"}
        process = cli.start("pull", "hf:org/repo", env=environment)
        assert line_of(process) == f"{LINE}fetches hf:org/repo\n"
    process.communicate(timeout=60)
    assert process.returncode == 1  # nobody answers there
