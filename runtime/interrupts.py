"""Ctrl-C at a moment when it does no harm."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .._garbage import collection_paused


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the end of the block.

    Only where Python's own handler would raise KeyboardInterrupt: in the main thread, unless the program has a handler.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    interrupted = False

    def remember(signum: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


def import_native_modules(*names: str) -> None:
    """Import libraries whose initialisation a KeyboardInterrupt would crash, or turn into an ImportError."""
    with uninterrupted(), collection_paused():
        for name in names:
            importlib.import_module(name)
