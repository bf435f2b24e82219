"""What the command line writes to stderr: notes, errors, progress."""

from __future__ import annotations

import os
import shutil
import sys
import time

from .errors import CliError

_RED, _DIM, _RESET = "\x1b[31m", "\x1b[2m", "\x1b[0m"
_BAR_WIDTH = 24


def uses_colour() -> bool:
    """Colours only for a person: stderr is a terminal and NO_COLOR is unset or empty."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def error(message: str) -> None:
    label = f"{_RED}error:{_RESET}" if uses_colour() else "error:"
    _write(f"trivet: {label} {message}\n")


def note(message: str) -> None:
    """Something the user should know though nothing is wrong."""
    _write(f"{_DIM}{message}{_RESET}\n" if uses_colour() else f"{message}\n")


def answer(text: str) -> None:
    """Write to stdout, at once. BrokenPipeError when the reader has left, CliError when it cannot take the text."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as failure:
        raise CliError(f"cannot write to stdout: {failure.strerror}") from failure


def end_line() -> None:
    """After ^C: let the shell's prompt begin on a line of its own."""
    if sys.stderr.isatty():
        _write("\n")


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # stderr is closed: there is nobody left to tell


def format_bytes(size: float) -> str:
    """Decimal units, three digits: `98.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class ProgressBar:
    """A model_store Progress: a bar on a terminal, one line per stage elsewhere."""

    def __init__(self) -> None:
        self._stage = ""
        self._started = 0.0
        self._open = False

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self.close()
            self._stage, self._started = stage, now
            if not sys.stderr.isatty():
                note(f"{stage} ({format_bytes(total)})" if total else stage)
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            _write(f"\r{self._line(done, total, now - self._started)[:width].ljust(width)}")
            self._open = True

    def show_fraction(self, title: str, stage: str, fraction: float) -> None:
        """Progress without bytes: `stage` is the step of `title` that runs, `fraction` in [0, 1] of all steps."""
        if title != self._stage:
            self.close()
            self._stage = title
            if not sys.stderr.isatty():
                note(title)
        if sys.stderr.isatty():
            filled = int(_BAR_WIDTH * fraction)
            bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
            width = shutil.get_terminal_size().columns - 1
            _write("\r" + f"{title}  [{bar}] {stage}"[:width].ljust(width))
            self._open = True

    def close(self) -> None:
        """Leave the last state on the screen and go to a new line."""
        if self._open:
            _write("\n")
        self._open = False

    def _line(self, done: int, total: int | None, seconds: float) -> str:
        rate = done / seconds if seconds > 0.5 else 0.0
        speed = f"  {format_bytes(rate)}/s" if rate else ""
        if not total:
            return f"{self._stage}  {format_bytes(done)}{speed}"
        filled = _BAR_WIDTH * done // total
        eta = f"  {(total - done) / rate:.0f} s left" if rate and done < total else ""
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        return f"{self._stage}  [{bar}] {100 * done // total:3d}%  {format_bytes(total)}{speed}{eta}"
