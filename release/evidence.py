"""Results of gates, and the evidence that follows. No boolean follows from another one, and nothing from silence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# Evidence -> the gates that must all have passed on the very archive.
GATES: Mapping[str, tuple[str, ...]] = {
    "build_verified": ("build",),
    "archive_smoke_verified": ("archive", "contents", "help", "version", "server", "gpu-absent"),
    "dependency_audit_verified": ("elf", "paths", "supply-chain", "device-code"),
    "runtime_verified": ("completion", "confinement"),
    "correctness_verified": ("greedy-tokens",),
    "performance_verified": ("competitor",),
    "cpu_baseline_verified": ("cpu-baseline",),
    "rebuild_reproducible": ("rebuild",),
    "tag_rerun_verified": ("tag",),
}
TIER_GATES: Mapping[str, tuple[str, ...]] = {
    "build_verified": ("tier-code",),
    "runtime_verified": ("tier-run",),
    "correctness_verified": ("tier-tokens",),
    "performance_verified": ("tier-competitor",),
}
SM_GATES: Mapping[str, tuple[str, ...]] = {
    "build_verified": ("sm-code",),
    "runtime_verified": ("sm-run",),
    "correctness_verified": ("sm-tokens",),
    "performance_verified": ("sm-competitor",),
}
# What an emulated run says nothing about: these need the hardware itself.
HARDWARE_EVIDENCE = ("runtime_verified", "performance_verified")


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate's verdict. `state`: "passed", "failed" (or not run to its end), or "absent" (not possible here)."""

    gate: str
    state: str
    command: str  # what was run, for a person to repeat; no path of the machine
    reason: str = ""  # what failed or what is absent; empty if it passed
    emulated: bool = False  # ran on an emulated CPU
    subject: str = ""  # the CPU tier or SM it is about; empty = the whole archive
    archive_sha256: str | None = None  # the archive it looked at
    details: Mapping[str, Any] = field(default_factory=dict)  # figures for readers

    def report(self) -> bytes:
        """The file that references point to by its digest."""
        return (json.dumps(asdict(self), sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()

    def reference(self) -> dict[str, Any]:
        return {
            "gate": self.gate,
            "command": self.command,
            "passed": self.state == "passed",
            "archive_sha256": self.archive_sha256,
            "report_sha256": hashlib.sha256(self.report()).hexdigest(),
            "emulated": self.emulated,
        }


def judge(name: str, gates: tuple[str, ...], results: Iterable[GateResult]) -> dict[str, Any]:
    """The evidence entry `name`: verified only if each of `gates` has passed, else the worst thing that is known."""
    by_gate = {result.gate: result for result in results if result.gate in gates}
    used = [by_gate[gate] for gate in gates if gate in by_gate]
    references = [result.reference() for result in used]
    failed = [result for result in used if result.state not in ("passed", "absent")]
    absent = [result for result in used if result.state == "absent"]
    silent = [gate for gate in gates if gate not in by_gate]
    if failed:
        state, reason = "failed", "; ".join(f"gate {result.gate} failed: {result.reason}" for result in failed)
    elif absent:
        state, reason = "absent", "; ".join(f"gate {result.gate}: {result.reason}" for result in absent)
    elif silent:
        state, reason = "not_verified", f"gate {', '.join(silent)} did not run"
    elif name in HARDWARE_EVIDENCE and any(result.emulated for result in used):
        state, reason = "not_verified", "emulated: it ran on an emulated CPU only"
    else:
        return {"value": True, "state": "verified", "reason": None, "references": references}
    return {"value": False, "state": state, "reason": reason, "references": references}


def collect(gates: Mapping[str, tuple[str, ...]], results: Iterable[GateResult], subject: str = "") -> dict[str, Any]:
    """All evidence about `subject` ("" = the whole archive)."""
    about = [result for result in results if result.subject == subject]
    return {name: judge(name, needed, about) for name, needed in gates.items()}


def evidence_problems(
    name: str, entry: Mapping[str, Any], gates: tuple[str, ...], archive_sha256: str | None
) -> list[str]:
    """What is wrong with an entry that already conforms to the schema."""
    out = []
    verified = entry["state"] == "verified"
    if entry["value"] is not verified:
        out.append(f"{name}: value {entry['value']} contradicts state {entry['state']}")
    if verified and entry["reason"] is not None:
        out.append(f"{name}: verified, yet a reason says: {entry['reason']}")
    if not verified and not entry["reason"]:
        out.append(f"{name}: {entry['state']} without a reason")
    references = {reference["gate"]: reference for reference in entry["references"]}
    if foreign := sorted(set(references) - set(gates)):
        out.append(f"{name}: evidence of another kind: gate {', '.join(foreign)}")
    if entry["state"] == "failed" and not references:
        out.append(f"{name}: failed without a reference to what failed")
    for gate in gates if verified or entry["value"] else ():
        reference = references.get(gate)
        if reference is None:
            out.append(f"{name}: verified without the evidence of gate {gate}")
        elif not reference["passed"]:
            out.append(f"{name}: verified although gate {gate} did not pass")
        elif reference["archive_sha256"] != archive_sha256:
            out.append(f"{name}: the evidence of gate {gate} is about another archive")
        elif reference["emulated"] and name in HARDWARE_EVIDENCE:
            out.append(f"{name}: verified by an emulated run")
    return out
