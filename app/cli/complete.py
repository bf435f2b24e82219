"""`trivet complete`: continue a text."""

from __future__ import annotations

from argparse import Namespace

from . import console, options
from .conversation import add_session_flags, open_session, print_answer, print_json, read_lines
from .errors import UsageError
from .exit_codes import ExitCode
from .parser import ArgumentParser

DESCRIPTION = """Continue a text, without a chat template. Without PROMPT, every line that is typed or piped in is one.
The model runs in this process, or behind --url."""
_MAX_TOKENS = 16  # as the completions API


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", type=options.utf8_text, metavar="PROMPT", help="the text to continue")
    add_session_flags(parser)
    parser.add_argument("-q", "--quick", type=options.utf8_text, metavar="PROMPT", help="the same as PROMPT")
    parser.add_argument("--json", action="store_true", help="print one JSON object with each answer and its usage")
    options.add_sampling_flags(parser, max_tokens=str(_MAX_TOKENS))
    options.add_engine_flags(parser)
    parser.set_defaults(chat_template_kwargs={})


def run(args: Namespace) -> int:
    if args.prompt is not None and args.quick is not None:
        raise UsageError("PROMPT and --quick are the same; give one of them")
    sampling = {"max_tokens": _MAX_TOKENS, **options.sampling_options(args)}
    prompt = args.prompt if args.quick is None else args.quick
    with open_session(args) as session:
        if args.json:
            for text in read_lines("") if prompt is None else (prompt,):
                print_json(session, session.complete(text, sampling), stats=args.stats)
            return ExitCode.OK
        if prompt is not None:
            answer = print_answer(session.complete(prompt, sampling), stats=args.stats)
            return ExitCode.INTERRUPTED if answer is None else ExitCode.OK
        for line in read_lines("> "):
            if print_answer(session.complete(line, sampling), stats=args.stats) is None:
                console.note("(stopped)")
    return ExitCode.OK
