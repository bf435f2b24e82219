"""A release command that is told to end leaves nothing behind: no folder, no process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_bundle import ROOT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_the_temporary_folder_and_ends_what_was_started(number: int, tmp_path: Path) -> None:
    tools, work = tmp_path / "tools", tmp_path / "work"
    tools.mkdir()
    work.mkdir()
    openssl = tools / "openssl"  # the first program of `all`; with a child that goes on writing beside the key
    openssl.write_text(
        f'#!/bin/sh\nfor key; do :; done\necho $$ > {tmp_path}/pid\n'
        '(while sleep 0.01; do mkdir -p "$key.$(date +%N)" || exit; done) &\nwait\n'
    )  # fmt: skip
    openssl.chmod(0o755)
    command = [sys.executable, "-m", "release", "all", "linux-x86_64-glibc-cpu", "--out", str(tmp_path / "dist"),
               "--evidence", str(tmp_path / "evidence"), "--work", str(work)]  # fmt: skip
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text().endswith("\n"))
        assert [path.name.startswith("trivet-release-") for path in work.iterdir()] == [True]
        process.send_signal(number)
        process.communicate(timeout=20)
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert process.returncode in (128 + number, -number)
    assert list(work.iterdir()) == []
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
