"""Runs build commands: quiet when they work, loud when they do not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import BuildError


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 1800,
) -> str:
    """Run to the end and return stdout; BuildError with the end of the output if it fails or takes too long."""
    words = [str(word) for word in command]
    try:
        with started(words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{words[0]} could not be run to its end: {error}") from error
    if process.returncode != 0:
        tail = "\n".join((out + err).splitlines()[-40:])
        raise BuildError(f"`{' '.join(words)}` ended with status {process.returncode}:\n{tail}")
    return out


@contextlib.contextmanager
def started(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, which ends when the block raises; `settings` are Popen's."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, text=True, process_group=0, **settings) as process:
        try:
            yield process
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started, which writes into our folders
            raise
