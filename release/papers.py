"""Gate "supply-chain": the papers of a tree agree with each other and with every file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOTICES_NAME = "THIRD-PARTY-NOTICES.txt"
CYCLONEDX_NAME, SPDX_NAME = "sbom.cdx.json", "sbom.spdx.json"
# Files that would have to hold their own digest.
UNDESCRIBED = {CYCLONEDX_NAME, SPDX_NAME, "manifest.json"}


def version_file(tree: Path) -> dict[str, str]:
    lines = (tree / "VERSION").read_text(encoding="utf-8").splitlines()
    return {name: value for name, _, value in (line.partition(": ") for line in lines)}


def paper_problems(tree: Path, manifest: Mapping[str, Any]) -> list[str]:
    """What VERSION, both SBOMs and the notices say wrongly, or leave out."""
    cyclonedx = json.loads((tree / CYCLONEDX_NAME).read_text(encoding="utf-8"))
    spdx = json.loads((tree / SPDX_NAME).read_text(encoding="utf-8"))
    files = {entry["path"]: entry["sha256"] for entry in manifest["files"] if "link" not in entry}
    files = {path: digest for path, digest in files.items() if path not in UNDESCRIBED}
    return [
        *_version_problems(version_file(tree), manifest),
        *_difference("CycloneDX", cyclonedx_files(cyclonedx), files),
        *_difference("SPDX", spdx_files(spdx), files),
        *_component_problems(cyclonedx, spdx),
        *_notice_problems(cyclonedx, (tree / NOTICES_NAME).read_text(encoding="utf-8")),
    ]


def _version_problems(found: Mapping[str, str], manifest: Mapping[str, Any]) -> list[str]:
    source, target = manifest["source"], manifest["target"]
    expected = {
        "project": manifest["project"],
        "version": manifest["version"],
        "tag": source["tag"] or "none",
        "commit": source["commit"],
        "clean-tree": "yes" if source["clean_tree"] else "no",
        "compiler": manifest["build"]["toolchain"]["compiler"],
        "backend": target["backend"],
        "target": f"{target['os']}-{target['arch']}",
        "host-abi": target["libc"] or target["os"],
        "abi-version": str(manifest["abi_version"]),
    }
    names = sorted({*expected, *found})
    return [
        f"VERSION says {name}: {found.get(name)}, the manifest {expected.get(name)}"
        for name in names
        if expected.get(name) != found.get(name)
    ]


def cyclonedx_files(bom: Mapping[str, Any]) -> dict[str, list[str]]:
    """Path -> digests, one for each component that claims the file."""
    out: dict[str, list[str]] = {}
    for component in bom["components"]:
        for nested in component.get("components", []):
            if nested["type"] == "file":
                out.setdefault(nested["name"], []).append(nested["hashes"][0]["content"])
    return out


def spdx_files(document: Mapping[str, Any]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for file in document["files"]:
        digests = {entry["algorithm"]: entry["checksumValue"] for entry in file["checksums"]}
        out.setdefault(file["fileName"].removeprefix("./"), []).append(digests["SHA256"])
    return out


def _difference(kind: str, described: Mapping[str, list[str]], files: Mapping[str, str]) -> list[str]:
    out = [f"{kind} SBOM describes no component for {path}" for path in sorted(set(files) - set(described))]
    out += [f"{kind} SBOM describes {path}, which is not there" for path in sorted(set(described) - set(files))]
    for path in sorted(set(described) & set(files)):
        if described[path] != [files[path]]:
            out.append(f"{kind} SBOM has other digests for {path}")
    return out


def _component_problems(cyclonedx: Mapping[str, Any], spdx: Mapping[str, Any]) -> list[str]:
    out = []
    left = {(item["name"], item["version"]) for item in cyclonedx["components"]}
    right = {
        (item["name"], item["versionInfo"]) for item in spdx["packages"] if item["SPDXID"] != "SPDXRef-Package-bundle"
    }
    out += [f"only one SBOM names {name} {version}" for name, version in sorted(left ^ right)]
    for item in cyclonedx["components"]:
        modules = any(prop["name"] == "trivet:modules" for prop in item["properties"])
        if not item.get("licenses"):
            out.append(f"no licence for {item['name']}")
        if not modules and not any(nested["type"] == "file" for nested in item.get("components", [])):
            out.append(f"{item['name']} is listed, but nothing of it is in the bundle")
    return out


def _notice_problems(cyclonedx: Mapping[str, Any], notices: str) -> list[str]:
    out = []
    for item in cyclonedx["components"]:
        if {"name": "trivet:kind", "value": "own"} in item["properties"]:
            continue
        licence = item["licenses"][0]["expression"]
        if f"\n{item['name']} {item['version']}\nLicence: {licence}\n" not in notices:
            out.append(f"the notices lack {item['name']} {item['version']} under {licence}")
    return out
