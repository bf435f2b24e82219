"""Python's cycle collector, kept from looking through what a start makes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """For blocks that import modules or load a model: what they make is there to stay.

    Collections on the way to a hundred thousand objects take a fifteenth of a start. Afterwards all objects count as
    old ones, which the next full collection looks through. Nothing happens in a program that has turned the collector
    off, or has frozen objects of its own.
    """
    if not gc.isenabled() or gc.get_freeze_count() > 0:
        yield
        return
    try:
        gc.disable()  # in here: a KeyboardInterrupt may come right after it
        yield
    finally:
        gc.freeze()  # together these two move every object to the oldest generation
        gc.unfreeze()
        gc.enable()
