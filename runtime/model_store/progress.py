"""Progress of a download, watched from the size of what has arrived."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# (what is going on, bytes so far, bytes in all or None when unknown); may be called from another thread.
Progress = Callable[[str, int, int | None], None]

_INTERVAL_S = 0.1


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder; what vanishes meanwhile counts nothing."""
    total = 0
    for root, _, names in os.walk(folder):  # passes over folders that vanish, which Path.rglob does not
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


@contextmanager
def watch(folder: Path, stage: str, total: int | None, progress: Progress | None) -> Iterator[None]:
    """Report the size of `folder` to `progress` until the body ends."""
    if progress is None:
        yield
        return
    done = threading.Event()

    def report() -> None:
        while not done.wait(_INTERVAL_S):
            size = folder_size(folder)
            progress(stage, size if total is None else min(size, total), total)

    progress(stage, 0, total)
    thread = threading.Thread(target=report, name="trivet-download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
