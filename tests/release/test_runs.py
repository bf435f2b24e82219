"""Judgement of what a running bundle does: system calls, answers, versions. A shell script plays the program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_up_bundle import DIGEST, make_tree

from release.emulation import emulated
from release.errors import GateError
from release.evidence import TIER_GATES, judge
from release.runs import REFERENCE, Runner, answer_problems, server_problems
from release.smoke import trace_problems
from release.tiers import tier_facts

ALLOWED = ("/scratch/",)


@pytest.mark.parametrize(
    "line",
    [
        'openat(AT_FDCWD</scratch>, "/scratch/srv/x", O_RDWR|O_CREAT, 0644) = 3</scratch/srv/x>',
        'openat(AT_FDCWD</scratch/tmp>, "x", O_WRONLY|O_CREAT, 0644) = 3</scratch/tmp/x>',
        'openat(AT_FDCWD</>, "/etc/passwd", O_RDONLY|O_CLOEXEC) = 3</etc/passwd>',
        'openat(AT_FDCWD</>, "/dev/null", O_RDWR) = 3</dev/null>',
        'bind(3<TCP:[1]>, {sa_family=AF_INET, sin_port=htons(0), sin_addr=inet_addr("127.0.0.1")}, 16) = 0',
        'connect(3<UNIX:[1]>, {sa_family=AF_UNIX, sun_path="/var/run/nscd/socket"}, 110) = -1 ENOENT (No such file)',
        'sendto(3<TCP:[127.0.0.1:1->127.0.0.1:2]>, "x", 1, 0, NULL, 0) = 1',
    ],
)
def test_a_call_that_is_allowed(line: str) -> None:
    assert trace_problems(f"12 {line}", ALLOWED) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('openat(AT_FDCWD</>, "/srv/.cache/db", O_RDWR|O_CREAT, 0644) = 3</srv/.cache/db>', "openat /srv/.cache/db"),
        ('openat(AT_FDCWD</srv/x>, "y", O_WRONLY|O_CREAT, 0644) = 3</srv/x/y>', "openat /srv/x/y"),
        ('openat(AT_FDCWD</>, "/srv/x", O_RDWR|O_CREAT) = -1 EACCES (Permission denied)', "openat /srv/x"),
        ('mkdir("/var/lib/other", 0777) = 0', "mkdir /var/lib/other"),
        ('rename("/scratch/a", "/elsewhere/a") = 0', "rename /elsewhere/a"),
        ('unlink("/etc/passwd") = 0', "unlink /etc/passwd"),
        (
            'connect(3<UDP:[1]>, {sa_family=AF_INET, sin_port=htons(53), sin_addr=inet_addr("8.8.8.8")}, 16) = 0',
            "8.8.8.8",
        ),
        (
            'connect(3<TCPv6:[1]>, {sa_family=AF_INET6, sin6_port=htons(443), inet_pton(AF_INET6, "2606::1")}, 28) = 0',
            "2606",
        ),
        ('connect(3<UNIX:[1]>, {sa_family=AF_UNIX, sun_path="/run/dbus/socket"}, 110) = 0', "/run/dbus/socket"),
        (
            'connect(3<UDP:[1]>, {sa_family=AF_INET, sin_port=53, sin_addr=inet_addr("1.1.1.1")}, 16 <unfinished ...>',
            "1.1.1.1",
        ),
        ('openat(AT_FDCWD</>, "/srv/late", O_RDWR|O_CREAT, 0644 <unfinished ...>', "openat /srv/late"),
    ],
)
def test_a_call_that_reaches_out(line: str, complaint: str) -> None:
    (found,) = trace_problems(f"12 {line}", ALLOWED)
    assert complaint in found


def test_answers_and_server() -> None:
    cases = json.loads(REFERENCE.read_text(encoding="utf-8"))["cases"]
    answers = [case["text"] + " and more" for case in cases]
    assert answer_problems(answers) == []
    assert answer_problems(answers[1:]) == ["3 answers to 4 prompts"]
    (found,) = answer_problems([answers[0].replace("Paris", "Lyon"), *answers[1:]])
    assert "Lyon" in found
    seen = {"health": 200, "version": "1.2.3", "exit_status": 0}
    assert server_problems(seen, "1.2.3") == []
    for name, value in (("health", 503), ("version", "1.2.4"), ("exit_status", -9), ("exit_status", None)):
        assert len(server_problems(seen | {name: value}, "1.2.3")) == 1


SCRIPT = """#!/bin/sh
case "$1" in
  --version) echo "trivet {version}" ;;
  --help) {help} ;;
  *) echo fine ;;
esac
"""


def runner(tmp_path: Path, *, version: str = "1.2.3", help: str = "echo usage") -> Runner:
    tree = make_tree(tmp_path / "tree")
    manifest = json.loads((tree / "manifest.json").read_text())
    (tree / "trivet").write_text(SCRIPT.format(version=version, help=help))
    (tree / "trivet").chmod(0o755)
    (tmp_path / "scratch").mkdir()
    return Runner(tree, manifest, DIGEST, tmp_path / "scratch")


def states(results: list[object]) -> dict[str, str]:
    return {result.gate: result.state for result in results if not result.subject}  # type: ignore[attr-defined]


def test_without_a_model_nothing_is_claimed(tmp_path: Path) -> None:
    results = runner(tmp_path).results(None)
    assert states([*results]) == {
        "version": "passed",
        "help": "passed",
        "server": "absent",
        "completion": "absent",
        "confinement": "absent",
        "greedy-tokens": "absent",
        "cpu-baseline": "absent",
    }
    tiers = {(result.subject, result.gate): result.state for result in results if result.subject}
    assert tiers["avx2", "tier-run"] == "absent"
    # The made-up tree has no op library: its tiers cannot be shown to be there.
    assert tiers["avx2", "tier-code"] == "failed"
    about = [result for result in results if result.subject == "avx2"]
    assert judge("build_verified", TIER_GATES["build_verified"], about)["state"] == "failed"


def test_another_version(tmp_path: Path) -> None:
    (result,) = [result for result in runner(tmp_path, version="1.2.4").results(None) if result.gate == "version"]
    assert result.state == "failed" and "trivet 1.2.4" in result.reason


def test_help_that_fails(tmp_path: Path) -> None:
    (result,) = [result for result in runner(tmp_path, help="exit 3").results(None) if result.gate == "help"]
    assert result.state == "failed" and "status 3" in result.reason


def test_another_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(GateError, match=r"model\.gguf is not the model"):
        runner(tmp_path).results(tmp_path / "model.gguf")


def test_the_emulator_takes_children_too() -> None:
    command = emulated("Nehalem", ["/bin/true"])
    assert command[:2] == ["env", "QEMU_CPU=Nehalem"] and command[-1] == "/bin/true"
    script = command[command.index("-c") + 1]
    assert "binfmt_misc/register" in script and ":F'" in script


def test_facts_of_tiers() -> None:
    facts = {fact["name"]: fact for fact in tier_facts(("scalar", "avx512_vnni"))}
    assert facts["scalar"]["cpu_features"] == [] and "ZMM" in facts["avx512_vnni"]["os_state"]
