"""Rules of .github/workflows/release.yml: least rights, pinned actions, exact names; the unknown is an error."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from .errors import MatrixError
from .matrix import load_matrix
from .names import CHECKING_FILES, INDEX_FILES, ArchiveName
from .source import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
# Job -> (the jobs it needs, all its rights, whether only a tag in the protected environment starts it).
STAGES: Mapping[str, tuple[list[str], dict[str, str], bool]] = {
    "plan": ([], {"contents": "read"}, False),
    "build": (["plan"], {"contents": "read"}, False),
    "verify": (["plan", "build"], {"contents": "read"}, False),
    "attest": (["plan", "verify"], {"contents": "read", "id-token": "write", "attestations": "write"}, True),
    "publish": (["plan", "attest"], {"contents": "write"}, True),
}
# Jobs that run once for each tuple of a release -> (the artifact that one downloads, the one that it uploads). publish
# runs once and downloads what attest uploads for every tuple.
TUPLE = "${{ matrix.artifact_id }}"
HANDOFF: Mapping[str, tuple[str, str]] = {
    "build": ("", f"unverified-{TUPLE}"),
    "verify": (f"unverified-{TUPLE}", f"verified-{TUPLE}"),
    "attest": (f"verified-{TUPLE}", f"attested-{TUPLE}"),
}
RELEASE_FILES = "release-files"
# Tests of the rules, with a mutation for each: plan runs them on a line of their own, before anything is built.
CHECKED = ("manifest", "matrix", "signing", "workflows")
CHECKS = f"python3 -m pytest {' '.join(f'tests/release/test_{name}.py' for name in CHECKED)}"
TAG_ONLY = "github.event_name == 'push' && github.ref_type == 'tag'"
_TUPLE_NAME = re.compile(r"(?:linux|macos|windows)-(?:x86_64|aarch64|arm64)[a-z0-9-]*")
_PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")


def workflow_problems(text: str) -> list[str]:
    """What is wrong with the text of the workflow; empty if nothing."""
    workflow = yaml.safe_load(text)
    triggers = workflow.get(True, workflow.get("on"))  # YAML reads `on` as a boolean
    out = []
    if triggers != {"push": {"tags": ["v*"]}, "workflow_dispatch": None}:
        out.append(f"it is started by {triggers}; only version tags and a person may start it")
    if workflow.get("permissions") != {}:
        out.append(f"permissions of the whole workflow are {workflow.get('permissions')}, not none")
    jobs = workflow.get("jobs", {})
    if list(jobs) != list(STAGES):
        return [*out, f"its jobs are {', '.join(jobs)}; expected {', '.join(STAGES)}"]
    for name, job in jobs.items():
        out += [f"{name}: {problem}" for problem in [*_job_problems(name, job), *_step_problems(name, job)]]
    out += [f"plan: {problem}" for problem in _check_problems(jobs["plan"])]
    for name in HANDOFF:
        out += [f"{name}: {problem}" for problem in _lane_problems(name, jobs[name])]
    out += [f"publish: {problem}" for problem in _publish_problems(jobs["publish"])]
    out += [f"unpinned or uncommented: {line.strip()}" for line in text.splitlines() if _is_loose(line)]
    return [*out, *_tuple_problems(text)]


def _job_problems(name: str, job: Mapping[str, Any]) -> Iterator[str]:
    needs, rights, protected = STAGES[name]
    found = job.get("needs", [])
    if ([found] if isinstance(found, str) else found) != needs:
        yield f"needs {found}, expected {needs}"
    if job.get("permissions") != rights:
        yield f"permissions are {job.get('permissions')}, expected {rights}"
    if (job.get("environment") == "release") is not protected:
        yield f"environment is {job.get('environment')}"
    if (job.get("if") == TAG_ONLY) is not protected or ("if" in job) is not protected:
        yield f"condition is {job.get('if')}"
    if not isinstance(job.get("timeout-minutes"), int):
        yield "has no timeout"
    if unknown := sorted(set(job) - {
        "needs", "runs-on", "container", "timeout-minutes", "permissions", "environment", "if", "steps", "outputs",
        *(["strategy"] if name in HANDOFF else []),
    }):  # fmt: skip
        yield f"unknown settings: {', '.join(unknown)}"
    if "secrets." in str(job) and name != "attest":
        yield "reads a secret; only attest may"


def _lane_problems(name: str, job: Mapping[str, Any]) -> Iterator[str]:
    """Of a job that runs once for each tuple: exactly the tuples that plan lists, each by its own name throughout."""
    released = [entry.artifact_id for entry in load_matrix().released()]
    if job.get("strategy") != {"matrix": {"artifact_id": released}}:
        yield f"its strategy is {job.get('strategy')}; release-matrix.json releases {', '.join(released)}"
    if literal := _TUPLE_NAME.findall(str(job["steps"])):
        yield f"names {', '.join(literal)} in a step, where every tuple must be {TUPLE}"
    if foreign := {step["env"]["ARTIFACT_ID"] for step in job["steps"] if "ARTIFACT_ID" in step.get("env", {})} - {
        TUPLE
    }:
        yield f"sets ARTIFACT_ID to {', '.join(foreign)}, not {TUPLE}"
    for action, expected in zip(("download", "upload"), HANDOFF[name], strict=True):
        if (found := _artifacts(job, action)) != ([expected] if expected else []):
            yield f"{action}s {', '.join(found) or 'nothing'}, expected {expected or 'nothing'}"


def _publish_problems(job: Mapping[str, Any]) -> Iterator[str]:
    """Every tuple of the release is taken from attest, and each of its files attached; nothing else is."""
    released = load_matrix().released()
    expected = [f"attested-{entry.artifact_id}" for entry in released]
    if (found := _artifacts(job, "download")) != expected:
        yield f"downloads {', '.join(found)}, expected {', '.join(expected)}"
    files = [*INDEX_FILES, *CHECKING_FILES]
    for entry in released:
        name = ArchiveName("${VERSION}", entry.artifact_id, entry.archive_format)
        files += [str(name), *name.companions]
    attached = _attached(job)
    for file in sorted({f"{RELEASE_FILES}/{name}" for name in files} ^ set(attached)):
        yield f"{'attaches' if file in attached else 'does not attach'} {file}"


def _artifacts(job: Mapping[str, Any], action: str) -> list[str]:
    """Names of the artifacts that a job downloads or uploads."""
    steps = [step for step in job["steps"] if step.get("uses", "").startswith(f"actions/{action}-artifact@")]
    return [str(step.get("with", {}).get("name")) for step in steps]


def _attached(job: Mapping[str, Any]) -> list[str]:
    """The files behind the options of `gh release create`, with the script's own variables filled in."""
    script = "\n".join(step.get("run", "") for step in job["steps"])
    words = shlex.split(script.replace("\\\n", " "))
    values = dict(word.split("=", 1) for word in words if re.match(r"[a-z]+=", word))
    files = words[words.index("--notes-file") + 2 :] if "--notes-file" in words else []
    return [re.sub(r"\$([a-z]+)", lambda match: values.get(match[1], match[0]), word) for word in files]


def _check_problems(job: Mapping[str, Any]) -> Iterator[str]:
    lines = [line.strip() for step in job["steps"] for line in step.get("run", "").splitlines()]
    if CHECKS not in lines:
        yield f"does not run `{CHECKS}`"


def _step_problems(name: str, job: Mapping[str, Any]) -> Iterator[str]:
    for step in job["steps"]:
        action, given, script = step.get("uses", ""), step.get("with", {}), step.get("run", "")
        if unknown := sorted(set(step) - {"name", "id", "uses", "with", "env", "run"}):
            yield f"a step that may be left out or fail ({', '.join(unknown)}): {step.get('name', action)}"
        if re.search(r"\|\||set \+e", script):
            yield f"a script that hides a failure: {step.get('name')}"
        if "${{" in script:
            yield f"an expression inside a script: {step.get('name')}"
        if action.startswith("actions/checkout@") and given.get("persist-credentials") is not False:
            yield "checkout keeps its credentials"
        if action.startswith("actions/upload-artifact@") and given.get("if-no-files-found") != "error":
            yield "an upload that may be empty"
        if action.startswith("actions/download-artifact@") and (
            given.get("merge-multiple") is not True or "pattern" in given or not given.get("name")
        ):
            yield "a download that is not flat and of one exact name"
        if "artifact@" in action and re.search(r"[*?\[]", str(given.get("name")) + str(given.get("path"))):
            yield f"a wildcard in {given}"
        if name in ("attest", "publish") and re.search(r"[*?]|\[\[?", script):
            yield f"a wildcard in a script: {step.get('name')}"
        if "gh release" in script and name != "publish":
            yield "publishes"


def _is_loose(line: str) -> bool:
    match = re.match(r"\s*-?\s*uses:\s*(\S+)(.*)", line)
    return match is not None and not (_PINNED.fullmatch(match[1]) and re.match(r"\s+# v\d", match[2]))


def _tuple_problems(text: str) -> Iterator[str]:
    matrix = load_matrix()
    for artifact_id in sorted(set(_TUPLE_NAME.findall(text))):
        try:
            matrix.require_buildable(artifact_id, "part of a workflow")
        except MatrixError as error:
            yield str(error)
