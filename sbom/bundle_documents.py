"""The two SBOMs of a bundle, CycloneDX 1.6 and SPDX 2.3, from the same components. Equal input, equal bytes."""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from bundle import Component

_NAMESPACE = uuid.UUID("6f2a1c94-6f0e-5a7c-9f57-3d8f1d6f9a10")


def cyclonedx(name: str, version: str, components: Iterable[Component], files: Iterable[Mapping[str, Any]]) -> str:
    """`files` are the manifest's entries; each regular file becomes a nested component of its owner."""
    components = list(components)
    by_path = {entry["path"]: entry for entry in files if "link" not in entry}
    listed = [_cyclonedx_component(component, by_path) for component in components]
    root = {"type": "application", "bom-ref": name, "name": name, "version": version}
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, json.dumps(listed, sort_keys=True))}",
        "version": 1,
        "metadata": {"component": root | {"licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": listed,
        "dependencies": [{"ref": name, "dependsOn": [entry["bom-ref"] for entry in listed]}],
    }
    return json.dumps(bom, indent=1, ensure_ascii=False) + "\n"


def _cyclonedx_component(component: Component, by_path: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"{component.name}@{component.version}",
        "name": component.name,
        "version": component.version,
        "purl": component.purl,
        "licenses": [{"expression": component.license}],
        "properties": [{"name": "trivet:kind", "value": component.kind}],
    }
    if component.modules:
        out["properties"].append({"name": "trivet:modules", "value": " ".join(component.modules)})
    nested: list[dict[str, Any]] = [
        {
            "type": "file",
            "bom-ref": f"file:{path}",
            "name": path,
            "hashes": [{"alg": "SHA-256", "content": by_path[path]["sha256"]}],
        }
        for path in component.files
        if path in by_path
    ]
    for part in component.parts:
        entry: dict[str, Any] = {
            "type": "library",
            "bom-ref": f"{component.name}:{part['name']}@{part['version']}",
            "name": part["name"],
            "version": part["version"],
        }
        if part["purl"].startswith("pkg:"):
            entry["purl"] = part["purl"]
        if part["license"] != "NOASSERTION":
            entry["licenses"] = [{"license": {"name": part["license"]}}]
        nested.append(entry)
    return out | {"components": nested} if nested else out


def spdx(
    name: str, version: str, components: Iterable[Component], files: Iterable[Mapping[str, Any]], epoch: int
) -> str:
    """`files` as for cyclonedx, with a "sha1" each, which SPDX demands."""
    files, components = [entry for entry in files if "link" not in entry], list(components)
    main = "SPDXRef-Package-bundle"
    packages: list[dict[str, Any]] = [_spdx_package(main, name, version, "Apache-2.0", None)]
    code = hashlib.sha1("".join(sorted(entry["sha1"] for entry in files)).encode()).hexdigest()
    packages[0] |= {"filesAnalyzed": True, "packageVerificationCode": {"packageVerificationCodeValue": code}}
    packages[0]["licenseInfoFromFiles"] = ["NOASSERTION"]
    relationships = [_relation("SPDXRef-DOCUMENT", "DESCRIBES", main)]
    owner: dict[str, str] = {}
    for component in components:
        identifier = "SPDXRef-Package-" + re.sub(r"[^A-Za-z0-9.-]", "-", component.name)
        packages.append(_spdx_package(identifier, component.name, component.version, component.license, component.purl))
        relationships.append(_relation(main, "DEPENDS_ON", identifier))
        owner |= dict.fromkeys(component.files, identifier)
    listed = [_spdx_file(entry) for entry in files]
    for file, entry in zip(listed, files, strict=True):
        relationships.append(_relation(main, "CONTAINS", file["SPDXID"]))
        if entry["path"] in owner:
            relationships.append(_relation(file["SPDXID"], "GENERATED_FROM", owner[entry["path"]]))
    body = json.dumps([packages, listed], sort_keys=True)
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{name}-{version}",
        "documentNamespace": f"urn:uuid:{uuid.uuid5(_NAMESPACE, body)}",
        "creationInfo": {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "creators": [f"Tool: trivet-release-{version}"],
        },
        "hasExtractedLicensingInfos": _licences_outside_of_spdx(components),
        "packages": packages,
        "files": listed,
        "relationships": relationships,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _licences_outside_of_spdx(components: Iterable[Component]) -> list[dict[str, str]]:
    """Each LicenseRef-... with its text, which is the last one of a component that is under it."""
    found = {
        name: component.texts[-1][1]
        for component in components
        for name in re.findall(r"LicenseRef-[\w.-]+", component.license)
    }
    return [{"licenseId": name, "name": name, "extractedText": text} for name, text in sorted(found.items())]


def _spdx_file(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "SPDXID": "SPDXRef-File-" + hashlib.sha1(entry["path"].encode()).hexdigest()[:16],
        "fileName": f"./{entry['path']}",
        "checksums": [
            {"algorithm": "SHA1", "checksumValue": entry["sha1"]},
            {"algorithm": "SHA256", "checksumValue": entry["sha256"]},
        ],
        "licenseConcluded": "NOASSERTION",
        "licenseInfoInFiles": ["NOASSERTION"],
        "copyrightText": "NOASSERTION",
    }


def _spdx_package(identifier: str, name: str, version: str, licence: str, purl: str | None) -> dict[str, Any]:
    out: dict[str, Any] = {
        "SPDXID": identifier,
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": licence,
        "copyrightText": "NOASSERTION",
    }
    if purl is not None:
        reference = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}
        out["externalRefs"] = [reference]
    return out


def _relation(left: str, kind: str, right: str) -> dict[str, str]:
    return {"spdxElementId": left, "relationshipType": kind, "relatedSpdxElement": right}
