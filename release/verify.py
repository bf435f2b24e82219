"""`release verify`: judge an archive by its own bytes, unpacked into an empty folder; write down what was seen."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import provenance
from .archive import check_checksum, extract
from .audit import allowed_paths, content_problems, elf_problems, path_problems
from .channel import compute_channel
from .errors import GateError, ReleaseError, SignatureError
from .evidence import GATES, SM_GATES, TIER_GATES, GateResult, collect
from .gpu import device_code_problems, sm_results
from .manifest import MANIFEST_NAME, check_manifest, manifest_problems, to_bytes
from .matrix import Tuple, load_matrix, size_problems
from .names import parse_archive_name
from .papers import paper_problems, version_file
from .runs import Runner
from .tiers import tier_facts

ABSENT_GATES = {
    "competitor": "no comparison with another engine on this box was run for this archive",
    "rebuild": "`release rebuild` was not run for this archive",
}


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    evidence: Path  # folder for the reports and the manifest with evidence
    model: Path | None = None  # the GGUF file that release/references was recorded with; None = no run gates
    public_key: Path | None = None  # PEM file: the provenance must be signed by it; None = the signature is not judged
    forbidden: tuple[str, ...] = ()  # more path prefixes that no file may hold


def verify(archive: Path, options: VerifyOptions) -> dict[str, Any]:
    """Run all gates, write and return the manifest with evidence. Raises only for what cannot be judged at all.

    A gate that fails or breaks makes evidence false, with its reason; the caller looks at the channel.
    """
    name = parse_archive_name(archive.name)
    entry = load_matrix().require_buildable(name.artifact_id, "verified")
    options.evidence.mkdir(parents=True, exist_ok=True)
    digest = check_checksum(archive)
    too_large = "; ".join(size_problems(entry, archive.stat().st_size))
    state = "failed" if too_large else "passed"
    results = [GateResult("archive", state, "release verify", too_large, archive_sha256=digest)]
    with tempfile.TemporaryDirectory(prefix="trivet-verify-") as folder:
        tree = extract(archive, _fresh(Path(folder), "tree with spaces é"))
        manifest = json.loads((tree / MANIFEST_NAME).read_text(encoding="utf-8"))
        check_manifest(manifest, load_matrix())
        session = _Session(archive, digest, tree, manifest, entry, options)
        results += session.static_results()
        # What failed to be what it says is not started.
        if all(result.state != "failed" for result in results):
            results += Runner(tree, manifest, digest, _fresh(Path(folder), "run")).results(options.model)
    results += _recorded(options.evidence, digest)
    return _write(manifest, entry, archive, digest, results, options.evidence)


def _fresh(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


@dataclass(frozen=True, slots=True)
class _Session:
    archive: Path
    digest: str
    tree: Path
    manifest: Mapping[str, Any]
    entry: Tuple
    options: VerifyOptions

    def static_results(self) -> list[GateResult]:
        manifest, tree = self.manifest, self.tree
        allowed = allowed_paths(self.entry.artifact_id, manifest["build"]["recipe"], manifest["version"])
        gates: dict[str, Callable[[], list[str]]] = {
            "contents": lambda: content_problems(tree, manifest, allowed),
            "elf": lambda: elf_problems(tree, manifest),
            "paths": lambda: path_problems(tree, self.options.forbidden),
            "supply-chain": lambda: paper_problems(tree, manifest),
            "device-code": lambda: device_code_problems(tree, manifest, self.entry),
            "build": self.build_problems,
            "tag": self.tag_problems,
        }
        found = [self._result(gate, judge) for gate, judge in gates.items()]
        return found + sm_results(tree, self.entry, self.digest)

    def _result(self, gate: str, judge: Callable[[], list[str]]) -> GateResult:
        try:
            problems = judge()
        except (ReleaseError, OSError, ValueError, KeyError) as error:
            problems = [f"{type(error).__name__}: {error}"]
        command = f"release verify (gate {gate})"
        if gate == "tag" and problems:  # not built from a tag: nothing was tried that could fail
            return GateResult(gate, "absent", command, "; ".join(problems), archive_sha256=self.digest)
        state = "failed" if problems else "passed"
        return GateResult(gate, state, command, "; ".join(problems), archive_sha256=self.digest)

    def build_problems(self) -> list[str]:
        """Whether the provenance is about these bytes and says what the manifest says."""
        found = provenance.read_envelope(self.archive, self.options.public_key)
        stated = provenance.manifest_of(found)
        out = []
        for field in (
            "project",
            "version",
            "artifact_id",
            "abi_version",
            "source",
            "build",
            "target",
            "package",
            "files",
        ):
            if stated[field] != self.manifest[field]:
                out.append(f"provenance and manifest differ in {field}")
        commits = [
            item["digest"]["gitCommit"]
            for item in found["predicate"]["buildDefinition"]["resolvedDependencies"]
            if "digest" in item
        ]
        if commits != [self.manifest["source"]["commit"]]:
            out.append(f"provenance names the commits {commits}, the manifest {self.manifest['source']['commit']}")
        return out

    def tag_problems(self) -> list[str]:
        source = self.manifest["source"]
        tag = f"v{self.manifest['version']}"
        if source["tag"] != tag or source["clean_tree"] is not True:
            return [f"it was not built from the clean tree of the tag {tag}"]
        return [] if version_file(self.tree)["tag"] == tag else [f"VERSION does not name the tag {tag}"]


def _recorded(folder: Path, digest: str) -> list[GateResult]:
    """Results that other commands left in the evidence folder, about these bytes; and the absence of the rest."""
    out = {
        gate: GateResult(gate, "absent", "none", reason, archive_sha256=digest) for gate, reason in ABSENT_GATES.items()
    }
    for gate in ABSENT_GATES:
        path = folder / f"{gate}.json"
        if path.is_file():
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.get("archive_sha256") == digest and data.get("gate") == gate:
                out[gate] = GateResult(**data)
    return list(out.values())


def _write(
    manifest: Mapping[str, Any], entry: Tuple, archive: Path, digest: str, results: list[GateResult], folder: Path
) -> dict[str, Any]:
    tiers = tier_facts(entry.arch, entry.cpu_tiers)
    for tier in tiers:
        about = [result for result in results if result.subject == tier["name"]]
        seen = next((result.details for result in about if result.gate == "tier-run"), {})
        tier["detected"], tier["selected"] = seen.get("detected"), seen.get("selected")
        tier["evidence"] = collect(TIER_GATES, results, tier["name"])
    sms = [sm | {"evidence": collect(SM_GATES, results, sm["name"])} for sm in manifest["sms"]]
    with_evidence = {
        **manifest,
        "archive": {"name": archive.name, "sha256": digest, "size": archive.stat().st_size},
        "evidence": collect(GATES, results),
        "cpu_tiers": tiers,
        "sms": sms,
    }
    with_evidence["channel"] = compute_channel(with_evidence, entry)
    if found := manifest_problems(with_evidence, load_matrix()):
        raise GateError("the evidence contradicts itself:\n  " + "\n  ".join(found))
    for result in results:
        name = f"{result.gate}-{result.subject}.json" if result.subject else f"{result.gate}.json"
        if result.state != "absent":
            (folder / name).write_bytes(result.report())
    (folder / "release-manifest.json").write_bytes(to_bytes(with_evidence))
    return with_evidence


def attest(archive: Path, evidence: Path, key: Path) -> None:
    """Sign provenance that carries the manifest with evidence; SignatureError if the evidence is about other bytes."""
    path = evidence / "release-manifest.json"
    if not path.is_file():
        raise SignatureError(f"{evidence} holds no {path.name}; `python -m release verify` writes it there")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    check_manifest(manifest, load_matrix())
    if manifest["archive"] is None or manifest["archive"]["sha256"] != check_checksum(archive):
        raise SignatureError(f"the evidence in {evidence} is not about {archive.name}")
    found = provenance.read_envelope(archive, None)
    epoch = int(found["predicate"]["buildDefinition"]["internalParameters"]["SOURCE_DATE_EPOCH"])
    provenance.write_envelope(provenance.statement(manifest, archive, epoch=epoch), archive, key)
