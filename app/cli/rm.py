"""`trivet rm`: remove models from the cache."""

from __future__ import annotations

from argparse import Namespace

from . import console
from .errors import UsageError
from .exit_codes import ExitCode
from .parser import ArgumentParser

DESCRIPTION = """Remove models from the cache, with what was exported from them. Checkpoints elsewhere on the disk are
never touched."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="name or reference, as `trivet list` shows it")
    parser.add_argument(
        "--unused-exports",
        action="store_true",
        help="remove exported packages whose checkpoint is gone or has changed, or that another version made",
    )


def run(args: Namespace) -> int:
    from ...runtime import model_store

    if not args.models and not args.unused_exports:
        raise UsageError("which model? Give its name, or --unused-exports")
    for name in args.models:
        model = model_store.remove(name)
        console.note(f"removed {model.record.reference} ({console.format_bytes(model.size_bytes)})")
    if args.unused_exports:
        _remove_unused_exports()
    return ExitCode.OK


def _remove_unused_exports() -> None:
    from ...exporters.package_cache import cached_packages, remove_package
    from ...runtime import model_store

    unused = [export for export in cached_packages(model_store.packages_dir()) if export.problem]
    for export in unused:
        remove_package(export)
        console.note(f"removed {export.directory} ({console.format_bytes(export.size_bytes)}): {export.problem}")
    if not unused:
        console.note("every exported package is good")
