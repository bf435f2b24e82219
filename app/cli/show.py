"""`trivet show`: what a model is."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import console
from .exit_codes import ExitCode
from .listing import as_dict, table
from .loading import ExportNotes
from .parser import ArgumentParser

if TYPE_CHECKING:
    from ...backends.contract.manifest import Manifest

DESCRIPTION = """Describe a model: architecture, context, weight formats, tokenizer, origin. Fetches nothing.
A checkpoint without a package gets one first, as every command that runs it would make."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a path, a name in the cache, or a reference that was pulled")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    from ...runtime import model_store
    from ...runtime.config import LoadConfig
    from ...runtime.model_loader import resolve_package

    stored = model_store.find_name(args.model)
    if stored is None and (model_store.has_scheme(args.model) or args.model in model_store.catalogue().models):
        raise model_store.ModelNotFoundError(f"{args.model} is not in the cache; `trivet pull {args.model}` fetches it")
    bar = console.ProgressBar()
    try:
        package, manifest = resolve_package(args.model, LoadConfig(), progress=ExportNotes(bar))
    finally:
        bar.close()
    facts = _facts(package, manifest)
    if stored is not None:
        facts["stored"] = as_dict(stored)
    print(json.dumps(facts) if args.json else _text(facts))
    return ExitCode.OK


def _facts(package: Path, manifest: Manifest) -> dict[str, Any]:
    import msgspec

    from ...backends.contract.manifest import CHAT_TEMPLATE_NAME

    architecture = msgspec.to_builtins(manifest.architecture)
    return {
        "name": architecture.pop("name"),
        **architecture,
        "kv_elements_per_token": manifest.kv_elements_per_token,
        "chat_template": (package / CHAT_TEMPLATE_NAME).is_file(),
        "generation": {k: v for k, v in msgspec.to_builtins(manifest.generation).items() if v is not None},
        "generation_keys_without_effect": manifest.generation_keys_without_effect,
        "verification": msgspec.to_builtins(manifest.verification),
        "checkpoint_files": [str(Path(manifest.source_dir) / source.name) for source in manifest.sources],
        "checkpoint_bytes": sum(source.size_bytes for source in manifest.sources),
        "package": str(package),
        "license": manifest.extra.get("general.license"),
    }


def _text(facts: dict[str, Any]) -> str:
    formats = ", ".join(f"{name} x{count}" for name, count in facts["weight_formats"].items())
    verification, generation = facts["verification"], facts["generation"]
    ignored = facts["generation_keys_without_effect"]
    rows = [
        ("name", facts["name"]),
        ("family", facts["family"]),
        ("parameters", f"{facts['num_parameters'] / 1e6:.0f} M"),
        ("context", f"{facts['max_position_embeddings']} tokens"),
        ("layers", str(facts["num_hidden_layers"])),
        ("vocabulary", f"{facts['vocab_size']} tokens"),
        ("weights", f"{formats} ({console.format_bytes(facts['checkpoint_bytes'])})"),
        ("chat template", "yes" if facts["chat_template"] else "no"),
        *([("sampling", ", ".join(f"{name} {value}" for name, value in generation.items()))] if generation else []),
        *([("not honoured", ", ".join(ignored))] if ignored else []),
        ("verified", f"error {verification['max_relative_error']:.2g}" if verification["performed"] else "no"),
        ("checkpoint", facts["checkpoint_files"][0]),
        ("package", facts["package"]),
    ]
    stored = facts.get("stored")
    license_name = facts["license"] or (stored["license"] if stored else None)
    rows += [("license", license_name)] if license_name else []
    rows += [("reference", stored["reference"])] if stored else []
    return table(rows)
