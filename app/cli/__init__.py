"""The `trivet` command: one file per subcommand. stdout is data, stderr diagnostics."""

from __future__ import annotations

from .entry import main

__all__ = ["main"]
