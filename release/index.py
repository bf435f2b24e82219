"""`release index`: the download page and its JSON, from verified archives and signed provenance alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import provenance
from .archive import check_checksum, sha256_file
from .errors import ArchiveError, ManifestError
from .manifest import check_manifest
from .matrix import Matrix, load_matrix
from .names import CHECKING_FILES, INDEX_FILES, PUBLIC_KEY, VERIFIER, parse_archive_name
from .page import page
from .process import run
from .source import ROOT

RETENTION = "Archives of a stable release stay for good; those of a preview until two later versions are out."
SCHEMA = "trivet.release-index.v1"


def make_index(folder: Path, public_key: Path) -> list[dict[str, Any]]:
    """Write index.json and index.html in `folder`, and the files that strangers check the archives with.

    ReleaseError for a file that does not belong.
    """
    entries = read_release(folder, public_key)
    for name, content in _checking_files(public_key).items():
        (folder / name).write_bytes(content)
    for name, text in zip(INDEX_FILES, _index_texts(folder, entries), strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    return entries


def check_index(folder: Path, public_key: Path) -> None:
    """ArchiveError if the files of `make_index` are not exactly what the archives beside them and the key give."""
    entries = read_release(folder, public_key)
    for name in (*CHECKING_FILES, *INDEX_FILES):
        if not (folder / name).is_file():
            raise ArchiveError(f"{name} is missing; `release index` writes it")
    for name, content in _checking_files(public_key).items():
        if (folder / name).read_bytes() != content:
            raise ArchiveError(f"{name} is not the one of this release")
    for name, text in zip(INDEX_FILES, _index_texts(folder, entries), strict=True):
        if (folder / name).read_text(encoding="utf-8") != text:
            raise ArchiveError(f"{name} is not what the archives give; it was written by hand or is old")


def _checking_files(public_key: Path) -> dict[str, bytes]:
    """Their content. Of the key no more than what is public gets out."""
    return {
        VERIFIER: (ROOT / "release" / VERIFIER).read_bytes(),
        PUBLIC_KEY: run(["openssl", "pkey", "-pubin", "-in", public_key, "-pubout"]).encode(),
    }


def _index_texts(folder: Path, entries: list[dict[str, Any]]) -> tuple[str, str]:
    body = {
        "schema": SCHEMA,
        "version": entries[0]["version"],
        "retention": RETENTION,
        "checking_files": [{"name": name, "sha256": sha256_file(folder / name)} for name in CHECKING_FILES],
        "artifacts": entries,
    }
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n", page(body)


def read_release(folder: Path, public_key: Path) -> list[dict[str, Any]]:
    """Index entries of the archives in `folder`, by artifact id; every file must belong to one release."""
    matrix = load_matrix()
    ours = {*INDEX_FILES, *CHECKING_FILES}
    names = sorted(path.name for path in folder.iterdir() if path.name not in ours)
    entries = []
    expected: set[str] = set()
    for name in names:
        if name.endswith((".tar.gz", ".zip")):
            entries.append(_entry(folder / name, public_key, matrix))
            expected |= {name, *parse_archive_name(name).companions}
    if foreign := sorted(set(names) - expected):
        raise ArchiveError(f"{folder} holds files of no release: {', '.join(foreign)}")
    if missing := sorted(expected - set(names)):
        raise ArchiveError(f"{folder} lacks {', '.join(missing)}")
    if not entries:
        raise ArchiveError(f"{folder} holds no archive")
    versions = sorted({(entry["version"], entry["commit"]) for entry in entries})
    if len(versions) > 1:
        raise ArchiveError(
            f"{folder} mixes releases: {', '.join(f'{version} of {commit}' for version, commit in versions)}"
        )
    return sorted(entries, key=lambda entry: str(entry["artifact_id"]))


def _entry(archive: Path, public_key: Path, matrix: Matrix) -> dict[str, Any]:
    return index_entry(read_manifest(archive, public_key, matrix))


def read_manifest(archive: Path, public_key: Path, matrix: Matrix | None = None) -> dict[str, Any]:
    """The signed manifest with the evidence about `archive`; ReleaseError if there is none that may be published."""
    matrix = matrix or load_matrix()
    name = parse_archive_name(archive.name)
    matrix.require_buildable(name.artifact_id, "indexed")
    digest = check_checksum(archive)
    try:
        manifest = provenance.manifest_of(provenance.read_envelope(archive, public_key))
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{archive.name}: its provenance holds no manifest: {error}") from error
    check_manifest(manifest, matrix)
    if manifest["archive"] is None:
        raise ManifestError(f"{archive.name} was not verified: its provenance holds no evidence")
    if (manifest["archive"]["sha256"], manifest["archive"]["name"]) != (digest, archive.name):
        raise ManifestError(
            f"{archive.name}: the evidence is about {manifest['archive']['name']} {manifest['archive']['sha256']}"
        )
    if manifest["channel"]["name"] == "blocked":
        raise ManifestError(f"{archive.name} is blocked: {'; '.join(manifest['channel']['reasons'])}")
    return manifest


def index_entry(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the index says about one archive: nothing that the manifest does not."""
    target = manifest["target"]
    parts = ("build_verified", "runtime_verified", "correctness_verified")
    return {
        "artifact_id": manifest["artifact_id"],
        "version": manifest["version"],
        "commit": manifest["source"]["commit"],
        "archive": manifest["archive"]["name"],
        "size": manifest["archive"]["size"],
        "sha256": manifest["archive"]["sha256"],
        "channel": manifest["channel"]["name"],
        "why_not_better": manifest["channel"]["reasons"],
        "abi_floor": {
            "libc": f"{target['libc']} {target['libc_floor']}" if target["libc"] else target["os"],
            "cpu": target["cpu_baseline"],
            "host_libraries": target["host_libraries"],
        },
        "driver": manifest["driver"],
        "cpu_tiers": {
            tier["name"]: {name: tier["evidence"][name]["value"] for name in parts} for tier in manifest["cpu_tiers"]
        },
        "sms": {sm["name"]: {name: sm["evidence"][name]["value"] for name in parts} for sm in manifest["sms"]},
        "evidence": {name: entry["value"] for name, entry in manifest["evidence"].items()},
        "limits": manifest["limits"],
    }
