"""`main`: find the subcommand, run it, and turn what it raises into one line and an exit status."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from ... import __version__
from . import console
from .errors import UsageError
from .exit_codes import ExitCode
from .parser import ArgumentParser, suggestion

# Name -> one line of help. The module of the same name (`rm` -> rm.py) is imported only when the command runs.
COMMANDS = {
    "run": "answer one prompt",
    "chat": "talk with a model, line by line",
    "complete": "continue a text, without a chat template",
    "serve": "serve a model over the OpenAI API",
    "pull": "fetch a model into the cache",
    "list": "list the models in the cache",
    "show": "describe a model",
    "rm": "remove a model from the cache",
    "export": "turn a checkpoint into a model package",
    "bench": "measure a model, or a server",
    "doctor": "describe this installation and this machine",
}


class Command(Protocol):
    """What a subcommand's module offers."""

    DESCRIPTION: str

    def add_arguments(self, parser: ArgumentParser) -> None: ...

    def run(self, args: Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; raises nothing but SystemExit for --help and --version."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a character the terminal cannot show must not end the run
    try:
        status = _dispatch(arguments)
        console.answer("")  # what is buffered
        return int(status)
    except KeyboardInterrupt:
        console.end_line()
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        _drop_unwritten()
        return int(ExitCode.BROKEN_PIPE)
    except Exception as error:
        _drop_unwritten()
        return int(_report(error))


def _drop_unwritten() -> None:
    """Write what is buffered, or drop it where that is impossible: the interpreter would complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> None:
    """Put something in place of standard streams that are closed, or the next file opened would take their number.

    Reading gives the end of input, notes go nowhere, and writing an answer fails as it should.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            flags = os.O_WRONLY if number == 2 else os.O_RDONLY  # a write to stdout is an error (EBADF)
            os.dup2(os.open(os.devnull, flags), number)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_top_parser().format_help(), end="", file=sys.stderr)
        return ExitCode.USAGE
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    name = arguments[0]
    if name.startswith("-"):
        _top_parser().parse_strictly(arguments)
        return ExitCode.OK
    if name not in COMMANDS:
        hint = suggestion(name, list(COMMANDS)) or f"; the commands are {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {name!r}{hint}")
    from ...runtime.interrupts import import_native_modules

    import_native_modules("msgspec")
    command = cast(Command, import_module(f".{name}", __package__))
    parser = ArgumentParser(prog=f"trivet {name}", description=command.DESCRIPTION)
    command.add_arguments(parser)
    parser.shorten_usage()
    if parser.find_flag("--config") is not None:
        from .config_file import expand

        arguments = [name, *expand(arguments[1:], parser)]
    return command.run(parser.parse_strictly(arguments[1:]))


def _top_parser() -> ArgumentParser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    parser = ArgumentParser(
        prog="trivet",
        usage="trivet [--help] [--version] COMMAND ...",
        description=f"Run language models on this machine.\n\ncommands:\n{commands}",
        epilog="`trivet COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"trivet {__version__}")
    return parser


def _report(error: Exception) -> ExitCode:
    """Say in one line what failed; the traceback only under TRIVET_DEBUG=1."""
    if os.environ.get("TRIVET_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    ours = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
    if ours:
        text = str(error)
    elif isinstance(error, OSError):
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror or str(error)
    else:
        text = f"internal error: {type(error).__name__}: {error} (TRIVET_DEBUG=1 shows where)"
    console.error(" ".join(text.split()))
    return _exit_code(error)


def _exit_code(error: Exception) -> ExitCode:
    if isinstance(error, UsageError):
        return ExitCode.USAGE
    from ...runtime.config_fields import ConfigError
    from ...runtime.errors import InvalidRequestError
    from ...runtime.model_store.errors import AmbiguousModelError, InvalidReferenceError, ModelNotFoundError

    if isinstance(error, ModelNotFoundError | AmbiguousModelError | InvalidReferenceError):
        return ExitCode.MODEL_NOT_FOUND
    if isinstance(error, InvalidRequestError | ConfigError):
        return ExitCode.USAGE
    return ExitCode.ERROR
