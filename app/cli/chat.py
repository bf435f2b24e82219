"""`trivet chat`: a conversation, line by line."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from . import console, options
from .conversation import add_session_flags, open_session, print_answer, read_lines
from .errors import UsageError
from .exit_codes import ExitCode
from .parser import ArgumentParser, suggestion

if TYPE_CHECKING:
    from ..session import Message, Session

DESCRIPTION = """Talk with a model, line by line, typed or piped in. ^C stops an answer; ^C or ^D at the prompt ends the
chat. A line that begins with a slash is a command: /help lists them, /clear forgets what was said, /exit ends the chat;
a line for the model that begins with a slash needs a space in front. The model runs in this process, or behind
--url."""
_COMMANDS = {
    "/help": "list the commands",
    "/clear": "begin anew: forget what was said",
    "/exit": "end the chat, as ^D does",
}


def add_arguments(parser: ArgumentParser) -> None:
    add_session_flags(parser)
    parser.add_argument("--system-prompt", "--system", type=options.utf8_text, metavar="TEXT", help="system message")
    parser.add_argument(
        "-q", "--quick", type=options.utf8_text, metavar="PROMPT", help="answer this one prompt and exit"
    )
    options.add_chat_template_kwargs_flag(parser)
    options.add_sampling_flags(parser)
    options.add_engine_flags(parser)


def run(args: Namespace) -> int:
    sampling = options.sampling_options(args)
    with open_session(args) as session:
        if not session.has_chat_template:
            raise UsageError(f"{session.model_name} has no chat template; use `trivet complete`")
        messages: list[Message] = []
        if args.system_prompt is not None:
            messages.append({"role": "system", "content": args.system_prompt})
        if args.quick is not None:
            messages.append({"role": "user", "content": args.quick})
            answer = print_answer(session.chat(messages, sampling), stats=args.stats)
            return ExitCode.INTERRUPTED if answer is None else ExitCode.OK
        if sys.stdin.isatty():
            console.note(f"{session.model_name}: ^C stops an answer, ^D ends the chat, /help lists commands")
        _talk(session, messages, sampling, stats=args.stats)
    return ExitCode.OK


def _talk(session: Session, messages: list[Message], sampling: dict[str, Any], *, stats: bool) -> None:
    from ...runtime.errors import InvalidRequestError
    from ..remote import RemoteError

    num_first = len(messages)
    for line in read_lines("> "):
        command = line.strip()
        if line.startswith("/") and "\n" not in command:  # a paste of several lines is text
            if command == "/exit":
                return
            if command == "/clear":
                del messages[num_first:]
                console.note("(forgotten)")
            else:
                _help(command)
            continue
        if line.startswith(" /"):
            line = line[1:]
        messages.append({"role": "user", "content": line})
        try:
            answer = print_answer(session.chat(messages, sampling), stats=stats)
        except (InvalidRequestError, RemoteError) as error:
            console.error(str(error))
            messages.pop()  # the conversation goes on as if the line had not been said
            continue
        if answer is None:
            messages.pop()
            console.note("(stopped; the question is forgotten)")
            continue
        messages.append({"role": "assistant", "content": answer})


def _help(command: str) -> None:
    """List the commands, or refuse one that is not known."""
    hint = "a line for the model that begins with a slash needs a space in front"
    if command != "/help":
        console.error(f"unknown command {command}{suggestion(command, list(_COMMANDS))}; /help lists them; {hint}")
        return
    for name, meaning in _COMMANDS.items():
        console.note(f"{name:<8}{meaning}")
    console.note(hint)
