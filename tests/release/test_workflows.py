"""The release workflow keeps its rules, and each rule notices when it is broken."""

from __future__ import annotations

import pytest

from release.matrix import load_matrix
from release.names import CHECKING_FILES, archive_name
from release.plan import plan
from release.workflows import CHECKS, HANDOFF, WORKFLOW, workflow_problems


@pytest.fixture(scope="module")
def text() -> str:
    return WORKFLOW.read_text(encoding="utf-8")


def test_the_workflow_keeps_the_rules(text: str) -> None:
    assert workflow_problems(text) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("permissions: {}", "permissions: write-all", "permissions of the whole workflow"),
        ("permissions: {}\n", "", "permissions of the whole workflow"),
        ("      contents: read\n    outputs", "      contents: write\n    outputs", "plan: permissions"),
        ("      id-token: write\n", "      id-token: write\n      packages: write\n", "attest: permissions"),
        ("      contents: write\n", "      contents: write\n      id-token: write\n", "publish: permissions"),
        ("  workflow_dispatch:", "  pull_request_target:\n  workflow_dispatch:", "only version tags"),
        ('tags: ["v*"]', 'tags: ["*"]', "only version tags"),
        ("persist-credentials: false", "persist-credentials: true", "checkout keeps its credentials"),
        ("          persist-credentials: false\n", "", "checkout keeps its credentials"),
        ("merge-multiple: true", "merge-multiple: false", "not flat"),
        ("          merge-multiple: true\n", "", "not flat"),
        (
            "          name: attested-linux-x86_64-glibc-cpu\n          path: release-files",
            "          pattern: attested-*\n          path: release-files",
            "not flat",
        ),
        ('"$cpu.sha256"', "release-files/*.sha256", "publish: a wildcard in a script"),
        ("          path: handoff/unverified\n", "          path: handoff/*\n", "attest: a wildcard in"),
        ("if-no-files-found: error", "if-no-files-found: ignore", "may be empty"),
        ("@11bd71901bbe5b1630ceea73d27597364c9af683  # v4.2.2", "@v4", "unpinned or uncommented"),
        (
            "@ea165f8d65b6e75b540449e92b4886f43607fa02  # v4.6.2",
            "@ea165f8d65b6e75b540449e92b4886f43607fa02",
            "unpinned",
        ),
        (
            "    environment: release\n    permissions:\n      contents: write",
            "    permissions:\n      contents: write",
            "publish: environment",
        ),
        ("    if: github.event_name == 'push' && github.ref_type == 'tag'\n", "", "attest: condition"),
        ("    needs: [plan, attest]", "    needs: [plan, verify]", "publish: needs"),
        ("    needs: [plan, verify]", "    needs: [plan, build]", "attest: needs"),
        ("[linux-x86_64-glibc-cpu,", "[linux-x86_64-glibc-rocm,", "is blocked"),
        ("[linux-x86_64-glibc-cpu,", "[linux-x86_64-glibc-new,", "holds no artifact"),
        (", linux-x86_64-glibc-cuda]", "]", "build: its strategy is"),
        (", linux-x86_64-glibc-cuda]", ", linux-aarch64-glibc-cpu]", "build: its strategy is"),
        (
            "artifact_id: [linux-x86_64-glibc-cpu, linux-x86_64-glibc-cuda]\n",
            "artifact_id: [linux-x86_64-glibc-cpu, linux-x86_64-glibc-cuda]\n      fail-fast: false\n",
            "build: its strategy is",
        ),
        (
            'release build "$ARTIFACT_ID"',
            "release build linux-x86_64-glibc-cpu",
            "names linux-x86_64-glibc-cpu in a step",
        ),
        ("ARTIFACT_ID: ${{ matrix.artifact_id }}", "ARTIFACT_ID: ${{ github.ref_name }}", "build: sets ARTIFACT_ID to"),
        ("name: verified-${{", "name: unverified-${{", "verify: uploads unverified-"),
        ("name: attested-${{ matrix.artifact_id }}", "name: attested", "attest: uploads attested, expected"),
        ("name: attested-linux-x86_64-glibc-cuda", "name: attested-linux-x86_64-glibc-cpu", "publish: downloads"),
        (' "$cuda" "$cuda.sha256"', ' "$cuda.sha256"', "does not attach release-files/trivet-${VERSION}-linux-x86_64"),
        (" release-files/verify_archive.py", "", "publish: does not attach release-files/verify_archive.py"),
        (" release-files/release.pub", "", "publish: does not attach release-files/release.pub"),
        ("release-files/release.pub", "release-files/release.pub notes.txt", "publish: attaches notes.txt"),
        ('-cuda.tar.gz"\n', '-cuda.zip"\n', "attaches release-files/trivet-${VERSION}-linux-x86_64-glibc-cuda.zip"),
        (
            "${{ needs.plan.outputs.version }}\n        run: |\n          sudo apt-get update",
            "${{ secrets.V }}\n        run: |\n          sudo apt-get update",
            "verify: reads a secret",
        ),
        ('plan ${TAG:+"$TAG"}', "plan ${{ github.ref_name }}", "an expression inside a script"),
        (
            "        name: Check the tag against the version\n",
            "        name: Check the tag against the version\n        continue-on-error: true\n",
            "may be left out or fail",
        ),
        (
            "          sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0\n",
            "          gh release create x\n",
            "verify: publishes",
        ),
        ("    timeout-minutes: 300\n", "", "build: has no timeout"),
        ("    timeout-minutes: 300\n", "    timeout-minutes: 300\n    secrets: inherit\n", "unknown settings: secrets"),
        ("  publish:\n", "  extra:\n", "its jobs are"),
        (f"          {CHECKS}\n", "", "plan: does not run `python3 -m pytest"),
        (CHECKS, f"echo '{CHECKS}'", "plan: does not run"),
        (CHECKS, f"{CHECKS} || true", "plan: a script that hides a failure"),
        (CHECKS, f"set +e\n          {CHECKS}", "plan: a script that hides a failure"),
        (CHECKS, CHECKS.removesuffix(" tests/release/test_workflows.py"), "plan: does not run"),
        (
            "      - id: plan\n",
            "      - id: plan\n        if: false\n",
            "plan: a step that may be left out or fail (if)",
        ),
        ("      - id: plan\n", "      - id: plan\n        shell: sh {0}\n", "left out or fail (shell)"),
    ],
)
def test_a_broken_rule_is_noticed(old: str, new: str, complaint: str, text: str) -> None:
    assert old in text
    found = workflow_problems(text.replace(old, new, 1))
    assert any(complaint in problem for problem in found), found


def test_the_workflow_publishes_what_plan_lists(text: str) -> None:
    """One list in three places: what plan says, what the lanes run for, what publish attaches."""
    version = plan(None)["version"]
    planned = [entry["artifact_id"] for entry in plan(None)["archives"]]
    assert planned == [entry.artifact_id for entry in load_matrix().released()]
    assert text.count(f"artifact_id: [{', '.join(planned)}]") == len(HANDOFF)
    for artifact_id in planned:
        name = archive_name(version, artifact_id, "tar.gz")
        assert f"name: attested-{artifact_id}\n" in text
        assert str(name).replace(version, "${VERSION}") in text
    assert all(f"release-files/{name}" in text for name in CHECKING_FILES)


def test_what_the_workflow_leaves_out_has_a_reason() -> None:
    found = plan(None)
    every = {entry.artifact_id for entry in load_matrix().tuples}
    assert every == {entry["artifact_id"] for entry in found["archives"]} | set(found["left_out"])
    assert found["left_out"]["linux-aarch64-glibc-cpu"].startswith("buildable by hand: it is cross-built on Debian 12")
    assert all(reason.partition(": ")[2] for reason in found["left_out"].values())
