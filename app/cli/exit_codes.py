"""What the exit status of `trivet` means."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    ERROR = 1  # something failed while it ran
    USAGE = 2  # unknown or invalid arguments
    MODEL_NOT_FOUND = 3  # the reference names no model, or several
    INTERRUPTED = 130  # Ctrl-C; a server: a second signal cut answers off
    BROKEN_PIPE = 141  # the reader of stdout went away
