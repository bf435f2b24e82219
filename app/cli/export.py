"""`trivet export`: turn a checkpoint into a model package."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from . import console
from .exit_codes import ExitCode
from .loading import ExportNotes
from .parser import ArgumentParser

DESCRIPTION = """Turn a checkpoint into a model package: a graph, a tokenizer and a manifest. The weights stay where
they are. Every command that takes a model does this by itself and keeps the result in the cache."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a .gguf file, a safetensors folder, or a reference")
    parser.add_argument("--out", metavar="DIR", help="folder to write (default: an entry of the cache)")
    parser.add_argument("--no-verify", action="store_true", help="do not compare the graph with the checkpoint")
    parser.add_argument("--tokenizer-pre", metavar="NAME", help="pre-tokenizer of a GGUF vocabulary, if it is unknown")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    from ...backends.contract.manifest import read_manifest
    from ...exporters import export
    from ...runtime import model_store

    bar = console.ProgressBar()
    try:
        checkpoint = model_store.resolve(args.checkpoint, progress=bar)
        package = export(
            checkpoint,
            None if args.out is None else Path(args.out),
            verify=not args.no_verify,
            tokenizer_pre=args.tokenizer_pre,
            cache_dir=model_store.packages_dir(),
            progress=ExportNotes(bar),
        )
    finally:
        bar.close()
    if not args.json:
        print(package)
        return ExitCode.OK
    manifest = read_manifest(package)
    written = sum(file.stat().st_size for file in package.iterdir() if file.is_file())
    facts = {
        "package": str(package),
        "family": manifest.architecture.family,
        "bytes_written": written,
        "verified": manifest.verification.performed,
        "max_relative_error": manifest.verification.max_relative_error,
    }
    print(json.dumps(facts))
    return ExitCode.OK
