"""`trivet rm`: remove models from the cache."""

from __future__ import annotations

from argparse import Namespace

from . import console
from .exit_codes import ExitCode
from .parser import ArgumentParser

DESCRIPTION = "Remove models from the cache. Checkpoints elsewhere on the disk are never touched."


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name or reference, as `trivet list` shows it")


def run(args: Namespace) -> int:
    from ...runtime import model_store

    for name in args.models:
        model = model_store.remove(name)
        console.note(f"removed {model.record.reference} ({console.format_bytes(model.size_bytes)})")
    return ExitCode.OK
