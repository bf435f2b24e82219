"""Locks between processes."""

from __future__ import annotations

import fcntl
import threading
from typing import IO, Any

from ._log import get_logger

logger = get_logger(__name__)

_SILENT_SECONDS = 1.0


def lock_exclusively(file: IO[Any], others: str) -> None:
    """Take the lock of an open file, which its closing gives back; OSError where the file system has none.

    After a second of waiting the log says what for: `others` is what another process does with it, "prepares FILE".
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        pass
    notice = threading.Timer(_SILENT_SECONDS, logger.warning, ("waiting for another process that %s", others))
    notice.daemon = True
    notice.start()
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    finally:
        notice.cancel()
