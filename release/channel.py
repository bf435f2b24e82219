"""Which channel an archive may be published in. It follows from the evidence; whatever is missing closes the door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .matrix import Tuple

PREVIEW_NEEDS = ("build_verified", "archive_smoke_verified", "dependency_audit_verified")
STABLE_NEEDS = (
    *PREVIEW_NEEDS,
    "runtime_verified",
    "correctness_verified",
    "cpu_baseline_verified",
    "tag_rerun_verified",
)
PART_NEEDS = ("build_verified", "runtime_verified", "correctness_verified")


def compute_channel(manifest: Mapping[str, Any], entry: Tuple) -> dict[str, Any]:
    """{"name": "stable", "preview" or "blocked", "reasons": why not better}. Never raises for a malformed manifest."""
    if entry.state != "buildable":
        return {"name": "blocked", "reasons": [f"{entry.artifact_id} is {entry.state}: {entry.reason}"]}
    evidence = manifest.get("evidence")
    if reasons := _missing(evidence, PREVIEW_NEEDS):
        return {"name": "blocked", "reasons": reasons}
    reasons = _missing(evidence, STABLE_NEEDS)
    for kind, names in (("cpu_tiers", entry.cpu_tiers), ("sms", entry.sms)):
        parts = manifest.get(kind)
        parts = parts if isinstance(parts, list) else []
        by_name = {part["name"]: part for part in parts if isinstance(part, dict) and "name" in part}
        for name in names:
            reasons += [f"{name}: {text}" for text in _missing(by_name.get(name, {}).get("evidence"), PART_NEEDS)]
    reasons += _source_reasons(manifest)
    if entry.max_channel != "stable":
        reasons.append(f"release-matrix.json allows {entry.max_channel} at best")
    return {"name": "preview" if reasons else "stable", "reasons": reasons}


def _missing(evidence: Any, names: tuple[str, ...]) -> list[str]:
    out = []
    for name in names:
        entry = evidence.get(name) if isinstance(evidence, dict) else None
        if not isinstance(entry, dict) or entry.get("value") is not True or entry.get("state") != "verified":
            reason = entry.get("reason") if isinstance(entry, dict) else None
            out.append(f"{name} is not true: {reason or 'there is no such evidence'}")
    return out


def _source_reasons(manifest: Mapping[str, Any]) -> list[str]:
    source, build = manifest.get("source"), manifest.get("build")
    out = []
    if not isinstance(source, dict) or source.get("clean_tree") is not True:
        out.append("the source tree was not clean")
    if not isinstance(source, dict) or source.get("tag") != f"v{manifest.get('version')}":
        out.append("it was not built from the tag of its version")
    if not isinstance(build, dict) or build.get("recipe") != "release":
        out.append("it was not built by the release recipe")
    return out
