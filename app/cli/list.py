"""`trivet list`: the models in the cache."""

from __future__ import annotations

import json
from argparse import Namespace

from . import console
from .exit_codes import ExitCode
from .listing import as_dict, table
from .parser import ArgumentParser

DESCRIPTION = "List the models in the cache."


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def run(args: Namespace) -> int:
    from ...runtime import model_store

    models = model_store.list_models()
    for folder in model_store.broken_folders():
        console.note(f"note: {folder} is no model that trivet pulled; remove it by hand")
    if args.json:
        print(json.dumps([as_dict(model) for model in models]))
        return ExitCode.OK
    if not models:
        console.note("the cache holds no models; `trivet pull smollm2` fetches one")
        return ExitCode.OK
    rows = [("NAME", "SIZE", "PULLED", "REFERENCE")]
    for model in models:
        record = model.record
        rows.append((record.name, console.format_bytes(model.size_bytes), record.pulled_at[:10], record.reference))
    print(table(rows))
    return ExitCode.OK
