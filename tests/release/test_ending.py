"""A release command that is told to end leaves nothing behind: no folder, no process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_bundle import ROOT
from processes import runs, until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_the_temporary_folder_and_ends_what_was_started(number: int, tmp_path: Path) -> None:
    tools, work = tmp_path / "tools", tmp_path / "work"
    tools.mkdir()
    work.mkdir()
    openssl = tools / "openssl"  # the first program of `all`; with a child that goes on writing beside the key
    pid_file = tmp_path / "pids"
    openssl.write_text(
        f"#!/bin/sh\nfor key; do :; done\n"
        f'(while sleep 0.01; do mkdir -p "$key.$(date +%N)" || exit; done) &\necho $$ $! > {pid_file}\nwait\n'
    )
    openssl.chmod(0o755)
    command = [sys.executable, "-m", "release", "all", "linux-x86_64-glibc-cpu", "--out", str(tmp_path / "dist"),
               "--evidence", str(tmp_path / "evidence"), "--work", str(work)]  # fmt: skip
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until(lambda: pid_file.is_file() and pid_file.read_text().endswith("\n"))
        assert [path.name.startswith("trivet-release-") for path in work.iterdir()] == [True]
        process.send_signal(number)
        process.communicate(timeout=20)
        assert process.returncode in (128 + number, -number)
        until(lambda: not any(runs(int(pid)) for pid in pid_file.read_text().split()))
        assert list(work.iterdir()) == []
    finally:
        process.kill()
        for group in pid_file.read_text().split()[:1] if pid_file.is_file() else []:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(group), signal.SIGKILL)
