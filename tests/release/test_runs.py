"""Judgement of what a running bundle does: system calls, answers, versions. A shell script plays the program."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from made_up_bundle import DIGEST, make_tree

from release import runs
from release.architectures import ARCHITECTURES, architecture_of
from release.emulation import emulated
from release.errors import GateError
from release.evidence import TIER_GATES, judge
from release.matrix import load_matrix
from release.runs import REFERENCE, Runner, answer_problems, server_problems
from release.smoke import serve_and_ask, trace_problems
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


def foreign_runner(tmp_path: Path) -> Runner:
    """Of a bundle for aarch64."""
    tree = make_tree(tmp_path / "tree")
    manifest = json.loads((tree / "manifest.json").read_text())
    manifest["target"]["arch"] = "aarch64"
    manifest["cpu_tiers"] = tier_facts("aarch64", tuple(ARCHITECTURES["aarch64"].tiers))
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
        "gpu-absent": "absent",
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


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is x86-64 and has the emulators."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


@pytest.mark.usefixtures("emulator")
def test_the_emulator_takes_children_too() -> None:
    command = emulated(ARCHITECTURES["x86_64"], "Nehalem", ["/bin/true"])
    assert command[:2] == ["env", "QEMU_CPU=Nehalem"] and command[-1] == "/bin/true"
    script = command[command.index("-c") + 1]
    assert "binfmt_misc/register" in script and "/usr/bin/qemu-x86_64-static:F'" in script


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("arch", "abi", "taken"), [("x86_64", 3, False), ("aarch64", 3, True), ("aarch64", 0, True)])
def test_which_programs_the_emulator_takes(arch: str, abi: int, taken: bool) -> None:
    """qemu itself is an x86-64 program marked as of the GNU ABI (3); programs of the other architecture may be, too."""
    architecture = ARCHITECTURES[arch]
    script = emulated(architecture, "max", ["true"])[-3]
    magic, mask = (
        bytes.fromhex(text.replace(r"\x", ""))
        for text in re.search(r":M::\\x7fELF([^:]+):([^:]+):", script).groups()  # type: ignore[union-attr]
    )
    program = bytes([2, 1, 1, abi]) + bytes(8) + bytes([3, 0, architecture.elf_machine, 0])  # a PIE, behind its \x7fELF
    assert (
        all((found ^ wanted) & bits == 0 for found, wanted, bits in zip(program, magic, mask[4:], strict=True)) is taken
    )


@pytest.mark.usefixtures("emulator")
def test_a_bundle_for_another_architecture_runs_where_its_tiers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is native: every run names an emulated CPU, and every verdict says so."""
    started: list[list[str]] = []

    def start(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 0, "trivet 1.2.3\n", "")

    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    judged = foreign_runner(tmp_path)
    monkeypatch.setattr(subprocess, "run", start)
    for tier, cpu in ((None, "max"), ("scalar", "cortex-a53"), ("neon", "cortex-a53"), ("dotprod", "cortex-a76")):
        judged.run("doctor", tier=tier)
        assert started[-1][:3] == ["env", f"QEMU_CPU={cpu}", "QEMU_LD_PREFIX=/usr/aarch64-linux-gnu"]
    (result,) = [result for result in judged.results(None) if result.gate == "version"]
    assert result.state == "passed" and result.emulated


def test_a_bundle_for_another_architecture_without_its_emulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    results = foreign_runner(tmp_path).results(None)
    assert {result.state for result in results} == {"absent"}
    assert {result.reason for result in results} == {"qemu-aarch64-static is not installed (Debian: qemu-user-static)"}
    assert {(result.gate, result.subject) for result in results} >= {("version", ""), ("tier-code", "i8mm")}


@pytest.mark.usefixtures("emulator")
def test_what_a_foreign_library_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be loaded here; the program tells what the least CPU lacks for each tier."""
    judged = foreign_runner(tmp_path)
    lacking = {"scalar": [], "neon": [], "dotprod": ["asimddp"], "i8mm": ["asimddp", "i8mm"]}
    tiers = {name: {"missing_features": missing} for name, missing in lacking.items()}
    monkeypatch.setattr(judged, "_doctor", lambda tier: {"cpu": {"features": ["asimd"], "tiers": tiers}})
    monkeypatch.setattr(runs, "instructions", lambda *_: [4])
    assert [judged._tier_code_problems(name) for name in judged.tiers] == [[], [], [], []]
    lacking["i8mm"].remove("asimddp")
    del judged._library_tiers
    (found,) = judged._tier_code_problems("i8mm")
    assert "asks for ['asimd', 'i8mm'] on i8mm" in found


def test_a_server_stays_on_its_emulated_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment knows nothing of the machine but what the run is about."""
    program = tmp_path / "trivet"
    program.write_text('#!/bin/sh\necho "$QEMU_CPU $TRIVET_CPU_TIER $QEMU_LD_PREFIX $OTHER"\nexit 3\n')
    program.chmod(0o755)
    for name, value in {"QEMU_CPU": "max", "TRIVET_CPU_TIER": "neon", "QEMU_LD_PREFIX": "/x", "OTHER": "y"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"status 3: max neon /x $"):
        serve_and_ask(program, tmp_path / "model", tmp_path, [], None)


def test_facts_of_tiers() -> None:
    facts = {fact["name"]: fact for fact in tier_facts("x86_64", ("scalar", "avx_vnni", "avx512_vnni"))}
    assert facts["scalar"]["cpu_features"] == [] and "ZMM" in facts["avx512_vnni"]["os_state"]
    assert facts["avx_vnni"]["kernels"] == ["matmul"] and "avx_vnni" not in facts["avx512_vnni"]["cpu_features"]
    (dotprod,) = tier_facts("aarch64", ("dotprod",))
    assert dotprod["cpu_features"] == ["asimd", "asimddp"] and dotprod["kernels"] == ["matmul"]


def test_every_archive_names_the_tiers_of_its_architecture() -> None:
    for entry in load_matrix().tuples:
        if entry.state == "buildable":
            assert entry.cpu_tiers == tuple(architecture_of(entry.arch).tiers)
    with pytest.raises(GateError, match="nothing is known of CPUs of riscv64"):
        architecture_of("riscv64")


@pytest.mark.parametrize(
    ("tier", "own", "others"),
    [
        ("dotprod", ["sdot\tv0.4s, v1.16b, v2.4b[0]", "udot\tv0.4s, v1.16b, v2.16b"], ["usdot\tv0.4s, v1.16b, v2.16b"]),
        ("i8mm", ["smmla\tv0.4s, v1.16b, v2.16b", "usdot\tv0.4s, v1.16b, v2.16b"], ["sdot\tv0.4s, v1.16b, v2.16b"]),
        ("avx2", ["vpaddd %ymm1,%ymm2,%ymm3"], ["paddd  %xmm1,%xmm2"]),
        (
            "avx_vnni",
            ["{vex} vpdpbusd %ymm1,%ymm2,%ymm3"],
            ["vpdpbusd %ymm1,%ymm2,%ymm3", "vpdpbusd %zmm1,%zmm2,%zmm3", "vpmaddubsw %ymm1,%ymm2,%ymm3"],
        ),
    ],
)
def test_instructions_of_a_tier(tier: str, own: list[str], others: list[str]) -> None:
    (mark,) = [entry.tiers[tier].mark for entry in ARCHITECTURES.values() if tier in entry.tiers]
    assert mark is not None
    assert all(mark.search(text) for text in own)
    assert not any(mark.search(text) for text in [*others, "mul\tv0.4s, v1.4s, v2.4s", "addps %xmm1,%xmm2"])
