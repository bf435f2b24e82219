"""`trivet run`: one prompt in, one answer out."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from . import console, options
from .conversation import print_json, show_warnings
from .errors import UsageError
from .exit_codes import ExitCode
from .loading import open_local
from .parser import ArgumentParser

if TYPE_CHECKING:
    from ..session import Delta, Session

DESCRIPTION = """Answer one prompt and exit. The prompt is the argument, what is piped in, or both (the pipe last).
The answer streams to stdout."""
_RAW_MAX_TOKENS = 256  # a model without a notion of turns may never stop


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", type=options.utf8_text, metavar="PROMPT", help="what to ask")
    options.add_model_flag(parser)
    parser.add_argument("--system", "--system-prompt", type=options.utf8_text, metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the answer and its usage")
    options.add_chat_template_kwargs_flag(parser)
    options.add_sampling_flags(
        parser, max_tokens=f"what the model or the context allows, {_RAW_MAX_TOKENS} without a chat template"
    )
    options.add_engine_flags(parser)
    parser.flags_elsewhere["--url"] = "did you mean `trivet chat --url URL`?"
    parser.flags_elsewhere |= dict.fromkeys(("--host", "--port"), "did you mean `trivet chat --url http://HOST:PORT`?")


def run(args: Namespace) -> int:
    sampling = options.sampling_options(args)
    prompt = _prompt(args)
    if args.raw and args.system is not None:
        raise UsageError("--system needs a chat template, and --raw leaves it out; give one of them")
    with open_local(args) as session, closing(_answer(session, args, prompt, sampling)) as deltas:
        if not args.json:
            return _print_text(deltas)
        print_json(session, deltas)
    return ExitCode.OK


def _prompt(args: Namespace) -> str:
    piped = options.read_stdin()
    parts = [part for part in (args.prompt, piped) if part]
    if not parts:
        raise UsageError('the prompt is empty: give one, as in `trivet run "Why is the sky blue?"`, or pipe one in')
    return "\n\n".join(parts)


def _answer(session: Session, args: Namespace, prompt: str, sampling: dict[str, Any]) -> Generator[Delta, None, None]:
    raw = args.raw
    if not raw and not session.has_chat_template:
        if args.system is not None:
            raise UsageError(f"--system needs a chat template, and {session.model_name} has none")
        console.note(f"{session.model_name} has no chat template: the prompt is continued as it is (--raw)")
        raw = True
    if raw:
        return session.complete(prompt, {"max_tokens": _RAW_MAX_TOKENS, **sampling})
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return session.chat([*system, {"role": "user", "content": prompt}], sampling)


def _print_text(deltas: Generator[Delta, None, None]) -> int:
    text = ""
    for delta in deltas:
        show_warnings(delta)
        console.answer(delta.text)
        text = delta.text or text
    if not text.endswith("\n"):
        console.answer("\n")
    return ExitCode.OK
