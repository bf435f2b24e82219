"""The line loop that `chat` and `complete` share."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from . import console, options
from .errors import UsageError
from .loading import URL_DEFAULT, open_local, open_remote
from .parser import ArgumentParser

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..session import Delta, Session


def add_session_flags(parser: ArgumentParser) -> None:
    options.add_model_flag(parser)
    parser.add_argument(
        "--url", nargs="?", const=URL_DEFAULT, metavar="URL",
        help=f"use a server instead; a URL without a path means its /v1 (without URL: {URL_DEFAULT})",
    )  # fmt: skip
    parser.add_argument("--model-name", metavar="NAME", help="with --url: the server's model (default: its first)")
    parser.add_argument("--api-key", metavar="KEY", help="with --url: its key (default: OPENAI_API_KEY, else EMPTY)")
    parser.flags_elsewhere |= dict.fromkeys(("--host", "--port"), "did you mean `--url http://HOST:PORT`?")
    parser.add_argument("--stats", action="store_true", help="show time to first token and tokens per second")


def open_session(args: Namespace) -> AbstractContextManager[Session]:
    """The session that the flags ask for; UsageError when they contradict each other."""
    if args.url is not None:
        local = [flag for flag, value in (("--model", args.model),) if value is not None]
        local += ["--" + name.replace("_", "-") for name in options.engine_options(args) if name != "seed"]
        if args.chat_template_kwargs:
            local.append("--chat-template-kwargs")
        if local:
            raise UsageError(f"{local[0]} is for a model in this process, not for a server (--url)")
        return open_remote(args)
    for flag, value in (("--model-name", args.model_name), ("--api-key", args.api_key)):
        if value is not None:
            raise UsageError(f"{flag} is for a server: give --url too")
    return open_local(args)


def read_lines(prompt: str) -> Iterator[str]:
    """Lines that the user types, or that are piped in, until the end of input or ^C. Pasted lines come as one text.

    With an empty `prompt` nothing is written to stdout.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        _edit_lines()
    while True:
        try:
            line = input(prompt if interactive else "")
        except (EOFError, KeyboardInterrupt):
            if interactive and prompt:
                print()
            return
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin is not valid UTF-8: {error.reason} at byte {error.start}") from error
        if line.strip():
            yield line


def _edit_lines() -> None:
    """Give input() editing, history and pastes of several lines; without readline, as in an archive, it has none."""
    try:
        import readline
    except ImportError:
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off


def print_answer(deltas: Generator[Delta, None, None], *, stats: bool) -> str | None:
    """Stream an answer to stdout and return it; None when ^C stopped it."""
    started = time.monotonic()
    meter = _Meter(started)
    text = ""
    stopped = False
    try:
        with closing(deltas):
            for delta in deltas:
                meter.count(delta)
                show_warnings(delta)
                text += delta.text
                console.answer(delta.text)
    except KeyboardInterrupt:
        stopped = True
    if not text.endswith("\n"):
        print()
    if stats:
        console.note(meter.describe())
    return None if stopped else text


def print_json(session: Session, deltas: Generator[Delta, None, None], *, stats: bool = False) -> None:
    """Print an answer, when it is complete, as one line of JSON. KeyboardInterrupt when ^C stopped it."""
    meter = _Meter(time.monotonic())
    text, finish_reason, usage = "", None, None
    with closing(deltas):
        for delta in deltas:
            meter.count(delta)
            show_warnings(delta)
            text += delta.text
            finish_reason = delta.finish_reason or finish_reason
            usage = delta.usage or usage
    answer = {
        "model": session.model_name,
        "text": text,
        "finish_reason": finish_reason,
        "usage": usage.as_dict() if usage else None,
    }
    console.answer(json.dumps(answer, ensure_ascii=False) + "\n")
    if stats:
        console.note(meter.describe())


def show_warnings(delta: Delta) -> None:
    for warning in delta.warnings:
        console.note(f"note: {warning}")


class _Meter:
    def __init__(self, started: float) -> None:
        self._started = started
        self._first: float | None = None
        self._last = started
        self._num_chunks = 0
        self._num_tokens: int | None = None

    def count(self, delta: Delta) -> None:
        if delta.text:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._num_chunks += 1
        if delta.usage is not None:
            self._num_tokens = delta.usage.completion_tokens

    def describe(self) -> str:
        if self._first is None:
            return "no tokens"
        tokens = self._num_chunks if self._num_tokens is None else self._num_tokens
        seconds = self._last - self._first
        rate = "one token"
        if tokens > 1:  # which may come in one piece
            rate = f"{(tokens - 1) / seconds:.1f} tokens/s" if seconds > 0 else "all at once"
        return f"[TTFT {1000 * (self._first - self._started):.0f} ms, {rate}, {tokens} tokens]"
