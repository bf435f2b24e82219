#!/usr/bin/env python3
"""Write trivet.cdx.json (CycloneDX 1.6): what the wheel requires and what its library was compiled from.

The same tree always gives the same bytes. The file is committed, because the build puts it into dist-info/sboms/.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "sbom" / "trivet.cdx.json"


def constant(path: Path, name: str) -> str:
    """The string assigned to `name` at the top of a Python file, without running it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]:
            return str(ast.literal_eval(node.value))
    raise SystemExit(f"{path}: no constant {name}")


def licensed(component: dict[str, Any], licence: str) -> dict[str, Any]:
    return component | {"licenses": [{"license": {"id": licence}}]}


def build_components(entries: list[dict[str, str]]) -> list[dict[str, Any]]:
    headers = ROOT / "cmake" / "ort_headers.py"
    package, version = constant(headers, "NPM_PACKAGE"), constant(headers, "NPM_VERSION")
    component = {
        "type": "library",
        "bom-ref": "onnxruntime-headers",
        "name": "onnxruntime-headers",
        "version": version,
        "purl": f"pkg:npm/{package}@{version}",
        "hashes": [{"alg": "SHA-512", "content": constant(headers, "NPM_SHA512")}],
    }
    (entry,) = entries
    return [licensed(component | {"description": entry["description"]}, entry["license"])]


def dependencies(requirements: list[str], licences: dict[str, str]) -> list[dict[str, Any]]:
    names = {requirement: re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements}
    if difference := sorted(set(names.values()) ^ set(licences)):
        raise SystemExit(f"components.toml and the dependencies of pyproject.toml differ in {difference}")
    components = []
    for requirement, name in sorted(names.items()):
        component = {
            "type": "library",
            "bom-ref": name,
            "name": name,
            "scope": "required",
            "purl": "pkg:pypi/" + re.sub(r"[-_.]+", "-", name).lower(),
            "properties": [{"name": "trivet:requirement", "value": requirement}],
        }
        components.append(licensed(component, licences[name]))
    return components


def generate() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = tomllib.loads((ROOT / "sbom" / "components.toml").read_text())
    version = constant(ROOT / "packaging" / "python" / "trivet" / "__init__.py", "__version__")
    required = dependencies(project["dependencies"], known["dependencies"])
    built_from = build_components(known["build"])
    main = {"type": "library", "bom-ref": "trivet", "name": "trivet", "version": version}
    main["purl"] = f"pkg:pypi/trivet@{version}"
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": licensed(main, project["license"])},
        "components": [*required, *built_from],
        "dependencies": [{"ref": "trivet", "dependsOn": [c["bom-ref"] for c in (*required, *built_from)]}],
    }
    return json.dumps(bom, indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(generate())
