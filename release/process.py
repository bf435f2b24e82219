"""Runs build commands: quiet when they work, loud when they do not."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

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
        done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{words[0]} could not be run to its end: {error}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise BuildError(f"`{' '.join(words)}` ended with status {done.returncode}:\n{tail}")
    return done.stdout
