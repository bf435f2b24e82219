"""`release notes`: release notes whose figures come from signed manifests and their evidence alone.

The template holds `{{ARTIFACT_ID FIGURE ...}}` where a figure belongs, and no figure of its own: a number with a unit
that somebody typed is refused. A throughput needs performance_verified, and the report that the manifest refers to.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import GateError, ReleaseError
from .index import read_manifest
from .matrix import load_matrix
from .names import archive_name

_PLACE = re.compile(r"\{\{\s*([^{}]+?)\s*\}\}")
# Numbers that claim something. Versions, dates and counts of other things carry no unit.
_TYPED = re.compile(
    r"(?i)\b\d[\d.,]*\s*(?:%|×|x\b|[kmgt]i?b\b|tok(?:en)?s?\s*(?:/|per)\s*s|ms\b|s\b|sec\w*\b|minutes?\b|times\b)"
    r"|\b(?:glibc|cuda|driver)[ _]\d[\d.]*"
)


def render(template: str, folder: Path, version: str, public_key: Path, evidence: Path | None) -> str:
    """The notes; GateError lists every figure that is typed by hand, unknown or not proven."""
    problems = typed_figures(template)
    manifests: dict[str, dict[str, Any]] = {}

    def figure(match: re.Match[str]) -> str:
        artifact_id, *words = match[1].split()
        try:
            if artifact_id not in manifests:
                entry = load_matrix().require_buildable(artifact_id, "quoted")
                name = archive_name(version, artifact_id, entry.archive_format)
                manifests[artifact_id] = read_manifest(folder / str(name), public_key)
            return _figure(manifests[artifact_id], words, evidence)
        except (ReleaseError, OSError, KeyError, ValueError) as error:
            problems.append(f"{match[0]}: {error}")
            return match[0]

    text = _PLACE.sub(figure, template)
    if problems:
        raise GateError("the release notes cannot be written:\n  " + "\n  ".join(problems))
    return text


def typed_figures(template: str) -> list[str]:
    """Figures with a unit outside of a placeholder."""
    out = []
    for number, line in enumerate(template.splitlines(), 1):
        out += [f"line {number}: {match[0]!r} is typed by hand" for match in _TYPED.finditer(_PLACE.sub("", line))]
    return out


def _figure(manifest: Mapping[str, Any], words: list[str], evidence: Path | None) -> str:
    plain: Mapping[str, Callable[[], str]] = {
        "archive": lambda: str(manifest["archive"]["name"]),
        "channel": lambda: str(manifest["channel"]["name"]),
        "size": lambda: f"{manifest['archive']['size'] / 1e6:.1f} MB",
        "unpacked": lambda: f"{manifest['package']['size'] / 1e6:.0f} MB",
        "libc": lambda: f"{manifest['target']['libc']} {manifest['target']['libc_floor']}",
        "cpu": lambda: str(manifest["target"]["cpu_baseline"]),
        "tiers": lambda: ", ".join(
            tier["name"] for tier in manifest["cpu_tiers"] if tier["evidence"]["runtime_verified"]["value"]
        ),
    }
    if len(words) == 1 and words[0] in plain:
        return plain[words[0]]()
    if len(words) in (3, 4) and words[0] in ("speed", "ratio"):
        measured = _competitor_figures(manifest, evidence)
        cell = measured[words[1]][words[2]]
        if words[0] == "speed" and len(words) == 3:
            return f"{cell['tokens_per_second']:.1f} tokens/s"
        if words[0] == "ratio" and len(words) == 4:
            return f"{cell['ratios'][words[3]]:.2f}"
    raise GateError(f"unknown figure; known are {', '.join(plain)}, speed MODEL CELL, ratio MODEL CELL PEER")


def _competitor_figures(manifest: Mapping[str, Any], evidence: Path | None) -> Mapping[str, Any]:
    entry = manifest["evidence"]["performance_verified"]
    if entry["value"] is not True:
        raise GateError(f"performance_verified is not true: {entry['reason']}")
    if evidence is None:
        raise GateError("a throughput needs --evidence, the folder with competitor.json")
    (reference,) = [item for item in entry["references"] if item["gate"] == "competitor"]
    content = (evidence / "competitor.json").read_bytes()
    if hashlib.sha256(content).hexdigest() != reference["report_sha256"]:
        raise GateError("competitor.json is not the report that the manifest refers to")
    figures: Mapping[str, Any] = json.loads(content)["details"]["figures"]
    return figures
