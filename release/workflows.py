"""Rules of .github/workflows/release.yml: least rights, pinned actions, exact names; the unknown is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from .errors import MatrixError
from .matrix import load_matrix
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
# Tests of the rules, with a mutation for each: plan runs them on a line of their own, before anything is built.
CHECKED = ("manifest", "matrix", "signing", "workflows")
CHECKS = f"python3 -m pytest {' '.join(f'tests/release/test_{name}.py' for name in CHECKED)}"
TAG_ONLY = "github.event_name == 'push' && github.ref_type == 'tag'"
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
    }):  # fmt: skip
        yield f"unknown settings: {', '.join(unknown)}"
    if "secrets." in str(job) and name != "attest":
        yield "reads a secret; only attest may"


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
    for artifact_id in sorted(set(re.findall(r"(?:linux|macos|windows)-(?:x86_64|aarch64|arm64)[a-z0-9-]*", text))):
        try:
            matrix.require_buildable(artifact_id, "part of a workflow")
        except MatrixError as error:
            yield str(error)
