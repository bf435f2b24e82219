"""argparse with our manners: no abbreviations, one-line errors, and a suggestion for an unknown flag."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from .errors import UsageError


class ArgumentParser(argparse.ArgumentParser):
    """Raises UsageError instead of printing usage and exiting."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.flags_elsewhere: dict[str, str] = {}  # a flag of other commands -> what to say of it

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def shorten_usage(self) -> None:
        """A usage line without the many flags, which the help lists anyway."""
        names = []
        for action in self._get_positional_actions():
            name = str(action.metavar)
            names.append(f"[{name}]" if action.nargs == "?" else f"{name} ..." if action.nargs == "+" else name)
        self.usage = " ".join([self.prog, "[FLAGS]", *names])

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of argv; UsageError names what is unknown and the closest flag."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(self._describe_unknown(unknown[0]))
        return args

    def flags(self) -> list[str]:
        """Every long flag."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def find_flag(self, flag: str) -> argparse.Action | None:
        return self._option_string_actions.get(flag)

    def _describe_unknown(self, argument: str) -> str:
        flag = argument.partition("=")[0]
        if not flag.startswith("-"):
            return f"unexpected argument {argument!r}"
        if advice := self.flags_elsewhere.get(flag):
            return f"unknown flag {flag}; {advice}"
        if self.find_flag("--config") is not None:  # a command that takes the engine's flags
            from ...runtime.config import UNSUPPORTED

            if reason := UNSUPPORTED.get(flag.removeprefix("--").replace("-", "_")):
                return f"{flag} is not supported: {reason}"
        return f"unknown flag {flag}{suggestion(flag, self.flags())}"


def suggestion(given: str, known: Iterable[str]) -> str:
    """`; did you mean …?` for the closest known name, or nothing. Dashes in front do not count: all flags have them."""
    names = {name.lstrip("-"): name for name in known}
    close = difflib.get_close_matches(given.lstrip("-"), names, n=1, cutoff=0.6)
    return f"; did you mean {names[close[0]]}?" if close else ""
