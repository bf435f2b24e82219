"""Pieces of the command line that need no process."""

from __future__ import annotations

import argparse
import io
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from trivet.app.cli import console
from trivet.app.cli.bench import BENCHMARKS
from trivet.app.cli.config_file import expand
from trivet.app.cli.entry import COMMANDS
from trivet.app.cli.errors import UsageError
from trivet.app.cli.listing import table
from trivet.app.cli.loading import ExportNotes
from trivet.app.cli.parser import ArgumentParser
from trivet.app.remote import RemoteError, RemoteSession, _parse_chunk


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bytes() -> None:
    assert [console.format_bytes(n) for n in (0, 999, 1000, 98_362_432, 4_300_000_000)] == [
        "0 B", "999 B", "1.0 kB", "98.4 MB", "4.3 GB",
    ]  # fmt: skip


def test_progress_on_a_terminal_rewrites_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "100")
    bar = console.ProgressBar()
    for done in (0, 50, 100):
        bar("downloading x", done, 100)
    bar.close()
    bar.close()
    lines = screen.getvalue().split("\r")[1:]
    assert len(lines) == 3 and [line.split("%")[0][-3:] for line in lines] == ["  0", " 50", "100"]
    assert "[############------------]" in lines[1] and screen.getvalue().count("\n") == 1
    assert max(map(len, lines)) <= 101


def test_an_export_after_a_download_begins_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    bar = console.ProgressBar()
    bar("downloading x", 100, 100)
    ExportNotes(bar)("reading", 0.5)
    ExportNotes(bar)("done", 1.0)
    bar.close()
    lines = [line.rpartition("\r")[2].rstrip() for line in screen.getvalue().split("\n")]
    full = f"[{'#' * 24}]"
    assert lines == [f"downloading x  {full} 100%  100 B", f"preparing the model, once  {full} done", ""]


def test_progress_elsewhere_is_one_line_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    bar = console.ProgressBar()
    for done in range(5):
        bar("downloading x", done, 2_000_000)
    bar("downloading y", 0, None)
    bar.close()
    assert log.getvalue() == "downloading x (2.0 MB)\ndownloading y\n"


def test_closed_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(ValueError, match="closed"):
        stream.isatty()
    monkeypatch.setattr(console, "uses_colour", lambda: False)
    console.error("x")


def test_config_file_keeps_positionals_apart(tmp_path: Path) -> None:
    parser = ArgumentParser(prog="trivet x")
    parser.add_argument("prompt")
    parser.add_argument("--config")
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--stop", action="append")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--quick")
    file = tmp_path / "c.yaml"
    file.write_text("names: [a, b]\nstop: [s, t]\nquiet: false\n")
    args = parser.parse_strictly(expand(["hello", "--config", str(file), "--stop=u"], parser))
    assert (args.prompt, args.names, args.stop, args.quiet) == ("hello", ["a", "b"], ["s", "t", "u"], False)
    with pytest.raises(UsageError, match="2 times"):
        expand(["--config", str(file), "--config", str(file)], parser)
    file.write_text("max-names: 1\nstop: [s]\nmax_names: 2\nstop: [t]\n")
    with pytest.raises(UsageError, match="max-names, stop given more than once"):
        expand(["--config", str(file)], parser)
    file.write_text("quick: [a, b]\n")
    with pytest.raises(UsageError, match="'quick' takes one value, got a list of 2"):
        expand(["--config", str(file)], parser)


def test_table() -> None:
    assert table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"


def test_every_command_is_described_by_its_module() -> None:
    from importlib import import_module

    for name in COMMANDS:
        module = import_module(f"trivet.app.cli.{name}")
        assert module.DESCRIPTION and callable(module.run) and callable(module.add_arguments)


@pytest.mark.parametrize("module", [*(f"cli.{name}" for name in COMMANDS), *(f"bench.{name}" for name in BENCHMARKS)])
def test_help_describes_every_flag_and_its_default(module: str) -> None:
    from importlib import import_module

    parser = ArgumentParser(prog="trivet")
    import_module(f"trivet.app.{module}").add_arguments(parser)
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        name = action.option_strings or action.dest
        assert action.help, name
        assert not any(f"default: {value}" in action.help for value in (None, True, False)), name
        silent = action.default in (None, False, argparse.SUPPRESS) or action.default in ([], {})
        assert silent or "default" in action.help, name


def test_remote_chunks() -> None:
    assert _parse_chunk(b'{"choices": [{"text": "a", "finish_reason": "stop"}]}').finish_reason == "stop"
    with pytest.raises(RemoteError, match="not JSON"):
        _parse_chunk(b"<html>")
    with pytest.raises(RemoteError, match="broken"):
        _parse_chunk(b'{"error": {"message": "broken"}}')
    with pytest.raises(RemoteError, match="the server failed: broken"):
        _parse_chunk(b'{"error": "broken"}')
    assert _parse_chunk(b'{"error": null, "choices": [{"delta": {"content": "a"}}]}').text == "a"
    for odd in (b"3", b'{"choices": [3]}', b'{"choices": [{"delta": null}]}', b'{"usage": {"prompt_tokens": 3}}'):
        with pytest.raises(RemoteError, match="no part of an answer"):
            _parse_chunk(odd)


@pytest.mark.parametrize("wrapped", [True, False], ids=["connecting", "answering"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("WRONG_VERSION_NUMBER", "the server at https://h/v1 does not speak TLS ({}); try --url http://h"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "no TLS connection to https://h/v1: {}; the server refused it: check"),
        ("UNSUPPORTED_PROTOCOL", "no TLS connection to https://h/v1: {}$"),
    ],
)
def test_tls_errors(monkeypatch: pytest.MonkeyPatch, name: str, says: str, wrapped: bool) -> None:
    """urllib wraps an error of connecting and sending, and not one of the answer."""
    error = ssl.SSLError(1, f"[SSL: {name}] words")
    error.reason = name

    def fail(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError(error) if wrapped else error

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", fail)
    with pytest.raises(RemoteError) as caught:
        RemoteSession("https://h", api_key="", model_name=None)
    assert f"{caught.value}$".startswith(says.format(f"[SSL: {name}] words"))
