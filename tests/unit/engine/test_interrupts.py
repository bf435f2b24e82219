"""Ctrl-C in places where an exception would do harm."""

from __future__ import annotations

import os
import signal
import time

import pytest
from trivet.runtime.interrupts import uninterrupted


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
