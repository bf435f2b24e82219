"""Ctrl-C in places where an exception would do harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from trivet.runtime.interrupts import uninterrupted

# ^C while msgspec's native half imports datetime, which it would then use without having it.
_INTERRUPTED_START = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "datetime":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    steps = []
    try:
        with pytest.raises(KeyboardInterrupt):
            with uninterrupted():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
                steps.append("whole")
            steps.append("after")
        assert steps == ["whole"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", ["list", "run", "serve", "show"])
def test_an_interrupt_while_a_command_is_imported_ends_it(command: str) -> None:
    code = _INTERRUPTED_START + "from trivet.app.__main__ import main\nsys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_while_a_public_name_is_imported_is_raised() -> None:
    code = (
        _INTERRUPTED_START
        + """
import trivet
try:
    trivet.SamplingParams
except KeyboardInterrupt:
    print("interrupted, then", trivet.SamplingParams(seed=1).seed)
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted, then 1\n", "")
