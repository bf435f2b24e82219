"""`trivet list`: the models in the cache, and what was exported from checkpoints."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import console
from .exit_codes import ExitCode
from .listing import as_dict, export_as_dict, table
from .parser import ArgumentParser

if TYPE_CHECKING:
    from ...exporters.package_cache import CachedPackage

DESCRIPTION = """List the models in the cache, or with --exports the packages that loading made of checkpoints.
A package points into its checkpoint's files, and is made again when it is missing."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--exports", action="store_true", help="list the exported packages instead")
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def run(args: Namespace) -> int:
    from ...exporters.package_cache import cached_packages
    from ...runtime import model_store

    exports = cached_packages(model_store.packages_dir())
    if args.exports:
        return _list_exports(exports, as_json=args.json)
    if unused := [export for export in exports if export.problem]:
        size = console.format_bytes(sum(export.size_bytes for export in unused))
        count = "1 exported package is" if len(unused) == 1 else f"{len(unused)} exported packages are"
        console.note(f"note: {count} of no use any more; "
                     f"`trivet rm --unused-exports` frees {size}")  # fmt: skip
    models = model_store.list_models()
    for folder in model_store.broken_folders():
        console.note(f"note: {folder} is no model that trivet pulled; remove it by hand")
    if args.json:
        print(json.dumps([as_dict(model) for model in models]))
        return ExitCode.OK
    rows = []
    for model in models:
        record = model.record
        rows.append((record.name, console.format_bytes(model.size_bytes), record.pulled_at[:10], record.reference))
    _print_table(("NAME", "SIZE", "PULLED", "REFERENCE"), rows, "no models; `trivet pull smollm2` fetches one")
    return ExitCode.OK


def _list_exports(exports: list[CachedPackage], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([export_as_dict(export) for export in exports]))
        return ExitCode.OK
    rows = []
    for export in exports:
        size = console.format_bytes(export.size_bytes)
        rows.append((export.directory.name, size, export.problem or "good", export.checkpoint or "unknown"))
    _print_table(("PACKAGE", "SIZE", "STATE", "CHECKPOINT"), rows, "no exported packages; loading a model makes one")
    return ExitCode.OK


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], otherwise: str) -> None:
    if rows:
        print(table([head, *rows]))
    else:
        console.note(f"the cache holds {otherwise}")
