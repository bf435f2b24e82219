"""`python -m trivet.app`, and where the command `trivet` starts."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line on sys.argv; the exit status. A ^C while it is imported ends it as quietly as later on."""
    try:
        from .cli import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return 130  # ExitCode.INTERRUPTED, which may not be imported yet


if __name__ == "__main__":
    sys.exit(main())
