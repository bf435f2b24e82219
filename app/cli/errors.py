"""Errors of the command line."""

from __future__ import annotations


class CliError(Exception):
    """A failed command; the message is one complete line (exit status 1)."""


class UsageError(CliError):
    """Arguments that cannot be used (exit status 2)."""
