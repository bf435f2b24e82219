"""The release manifest: its checker. manifest.schema.json says what it looks like, this file what must agree in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .channel import compute_channel
from .errors import ArchiveError, ManifestError, MatrixError
from .evidence import GATES, SM_GATES, TIER_GATES, evidence_problems
from .matrix import Matrix, Tuple
from .names import parse_archive_name
from .schema import schema_problems

SCHEMA_FILE = Path(__file__).with_name("manifest.schema.json")
MANIFEST_NAME = "manifest.json"
SCHEMA_NAME = "trivet.release-manifest.v1"


def load_schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return schema


def to_bytes(manifest: Mapping[str, Any]) -> bytes:
    """The canonical spelling of a manifest."""
    return (json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def check_manifest(manifest: Any, matrix: Matrix) -> None:
    """Raise ManifestError that lists everything wrong with it."""
    if found := manifest_problems(manifest, matrix):
        raise ManifestError("the release manifest is not valid:\n  " + "\n  ".join(found))


def manifest_problems(manifest: Any, matrix: Matrix) -> list[str]:
    """All that breaks the schema, or, if nothing does, all that contradicts itself or the matrix."""
    if out := schema_problems(manifest, load_schema()):
        return out
    try:
        entry = matrix.find(manifest["artifact_id"])
    except MatrixError as error:
        return [str(error)]
    return [
        *_identity_problems(manifest, entry),
        *_evidence_problems(manifest),
        *_part_problems("cpu_tiers", manifest["cpu_tiers"], entry.cpu_tiers),
        *_part_problems("sms", manifest["sms"], entry.sms),
        *_sm_problems(manifest["sms"], matrix),
        *_file_problems(manifest),
        *_channel_problems(manifest, entry),
    ]


def _identity_problems(manifest: Mapping[str, Any], entry: Tuple) -> list[str]:
    out = []
    target = manifest["target"]
    for name in ("os", "arch", "libc", "backend"):
        if target[name] != getattr(entry, name):
            out.append(f"target.{name} is {target[name]!r}; {entry.artifact_id} is for {getattr(entry, name)!r}")
    if sorted(manifest["driver"]) != sorted(entry.external):
        out.append(f"driver is {manifest['driver']}; the matrix names {list(entry.external)}")
    if missing := [limit for limit in entry.limits if limit not in manifest["limits"]]:
        out.append(f"limits lacks: {' '.join(missing)}")
    tag = manifest["source"]["tag"]
    if tag is not None and tag != f"v{manifest['version']}":
        out.append(f"source.tag is {tag}, version {manifest['version']}")
    if manifest["archive"] is not None:
        try:
            archive = parse_archive_name(manifest["archive"]["name"])
        except ArchiveError as error:
            return [*out, str(error)]
        if (archive.version, archive.artifact_id) != (manifest["version"], manifest["artifact_id"]):
            out.append(f"archive.name {archive} is not the name of {manifest['artifact_id']} {manifest['version']}")
        if archive.format != entry.archive_format:
            out.append(f"archive.name {archive} must end in {entry.archive_format}")
    return out


def _evidence_problems(manifest: Mapping[str, Any]) -> list[str]:
    digest = manifest["archive"]["sha256"] if manifest["archive"] is not None else None
    out = []
    for name, gates in GATES.items():
        out += evidence_problems(name, manifest["evidence"][name], gates, digest)
    for kind, table in (("cpu_tiers", TIER_GATES), ("sms", SM_GATES)):
        for part in manifest[kind]:
            for name, gates in table.items():
                found = evidence_problems(name, part["evidence"][name], gates, digest)
                out += [f"{kind} {part['name']}: {text}" for text in found]
    return out


def _part_problems(kind: str, parts: list[dict[str, Any]], expected: tuple[str, ...]) -> list[str]:
    names = [part["name"] for part in parts]
    out = [f"{kind} lacks {name}" for name in expected if name not in names]
    out += [f"{kind} holds {name}, which the matrix does not name" for name in names if name not in expected]
    return out + [f"{kind} holds {name} twice" for name in sorted({name for name in names if names.count(name) > 1})]


def _sm_problems(parts: list[dict[str, Any]], matrix: Matrix) -> list[str]:
    out = []
    for part in parts:
        aot = part["name"] in matrix.aot_sms
        if part["aot"] is not aot:
            out.append(f"sms {part['name']}: aot must be {aot}")
        if part["fallback"] != ("aot" if aot else "portable"):
            out.append(f"sms {part['name']}: fallback {part['fallback']} does not go with aot {aot}")
        if part["evidence"]["build_verified"]["value"] and not part["sass"]:
            out.append(f"sms {part['name']}: build_verified without SASS")
    return out


def _file_problems(manifest: Mapping[str, Any]) -> list[str]:
    out = []
    paths = [entry["path"] for entry in manifest["files"]]
    if paths != sorted(set(paths)):
        out.append("files is not sorted by path, or names one twice")
    regular = [entry for entry in manifest["files"] if "link" not in entry]
    for entry in regular:
        if missing := {"mode", "size", "sha256"} - set(entry):
            out.append(f"files {entry['path']}: lacks {', '.join(sorted(missing))}")
    if out:
        return out
    if sum(entry["size"] for entry in regular) != manifest["package"]["size"]:
        out.append("package.size is not the sum of the files")
    if len(paths) != manifest["package"]["num_files"]:
        out.append("package.num_files is not the number of files")
    return out


def _channel_problems(manifest: Mapping[str, Any], entry: Tuple) -> list[str]:
    computed = compute_channel(manifest, entry)
    if manifest["channel"] != computed:
        return [
            f"channel is {manifest['channel']['name']}; the evidence gives {computed['name']}: {computed['reasons']}"
        ]
    return []
