"""Gates that start the program of an unpacked tree: its answers, its server, its CPU tiers."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .architectures import architecture_of
from .archive import sha256_file
from .emulation import UNAVAILABLE, c_library, emulated, missing_tools
from .errors import GateError
from .evidence import GateResult
from .gpu import gpu_absent_problems, has_driver
from .papers import version_file
from .smoke import clean_environment, trace_problems
from .source import ROOT
from .tiers import LIBRARY, instructions, poison

REFERENCE = Path(__file__).with_name("references") / "smollm2-135m-q4_1.json"
_RUN_SECONDS, _EMULATED_SECONDS = 900.0, 3600.0
_SIGILL = (-4, 132)
_MODEL_GATES = ("server", "completion", "confinement", "greedy-tokens", "cpu-baseline", "gpu-absent")
_MODEL_TIER_GATES = ("tier-run", "tier-tokens")


class Runner:
    """Runs the program of one tree. `scratch` is an empty folder for its HOME, cache and copies.

    A program for another architecture runs on emulated CPUs: each tier where it is the best, all else on the richest.
    """

    def __init__(self, tree: Path, manifest: Mapping[str, Any], digest: str, scratch: Path) -> None:
        self.tree = tree
        self.manifest = manifest
        self.digest = digest
        self.scratch = scratch
        self.program = tree / "bin" / "trivet"
        self.architecture = architecture_of(manifest["target"]["arch"])
        self.emulated = not self.architecture.is_native
        self.tiers = [tier["name"] for tier in manifest["cpu_tiers"]]

    def results(self, model: Path | None) -> list[GateResult]:
        """All gates; those that need the model are absent without it, all of them where the program cannot run."""
        if self.emulated and (missing := missing_tools(self.architecture)):
            return self._all_absent(("version", "help", *_MODEL_GATES), ("tier-code", *_MODEL_TIER_GATES), missing)
        out = [self._judged("version", self._version_problems), self._judged("help", self._help_problems)]
        out += [
            self._judged("tier-code", lambda tier=tier: self._tier_code_problems(tier), tier) for tier in self.tiers
        ]
        if model is None:
            return out + self._all_absent(_MODEL_GATES, _MODEL_TIER_GATES, "no model file was given")
        expected = json.loads(REFERENCE.read_text(encoding="utf-8"))
        if sha256_file(model) != expected["model_sha256"]:
            raise GateError(f"{model.name} is not the model that {REFERENCE.name} was recorded with")
        out += self._server_results(model)
        out.append(self._guarded("cpu-baseline", lambda: self._baseline_result(model)))
        out.append(self._gpu_absent_result(model))
        for tier in self.tiers:
            out += self._tier_results(tier, model)
        return out

    def _gpu_absent_result(self, model: Path) -> GateResult:
        backend = self.manifest["target"]["backend"]
        if backend == "cuda" and has_driver():
            return self._absent("gpu-absent", "this machine has an NVIDIA driver; the gate is about one without")
        return self._judged("gpu-absent", lambda: gpu_absent_problems(self.run, model, backend))

    def _all_absent(self, gates: tuple[str, ...], tier_gates: tuple[str, ...], reason: str) -> list[GateResult]:
        of_tiers = [self._absent(gate, reason, tier) for tier in self.tiers for gate in tier_gates]
        return [*(self._absent(gate, reason) for gate in gates), *of_tiers]

    def _judged(self, gate: str, problems: Any, subject: str = "") -> GateResult:
        try:
            found = problems()
        except (GateError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            found = [f"{type(error).__name__}: {error}"]
        return self._result(gate, found, subject)

    def _guarded(self, gate: str, judge: Callable[[], GateResult]) -> GateResult:
        try:
            return judge()
        except (GateError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            return self._result(gate, [f"{type(error).__name__}: {error}"])

    def _result(
        self, gate: str, problems: list[str], subject: str = "", details: Mapping[str, Any] | None = None
    ) -> GateResult:
        state = "failed" if problems else "passed"
        command = f"release verify (gate {gate}{f', {subject}' if subject else ''})"
        return GateResult(gate, state, command, "; ".join(problems), self.emulated, subject, self.digest, details or {})

    def _absent(self, gate: str, reason: str, subject: str = "") -> GateResult:
        return GateResult(gate, "absent", "none", reason, False, subject, self.digest)

    def run(
        self, *arguments: str, tier: str | None = None, program: Path | None = None, cpu: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the program to its end; `cpu`: on this emulated one, None = where `tier` is to be shown."""
        command = [str(program or self.program), *arguments]
        environment = clean_environment(self.scratch) | ({"TRIVET_CPU_TIER": tier} if tier else {})
        return self._started(command, cpu or self._cpu(tier), environment, self.scratch)

    def _cpu(self, tier: str | None) -> str | None:
        """The emulated CPU of a run that shows `tier`, None = a run of no tier; None on this machine's own CPU."""
        if not self.emulated:
            return None
        return self.architecture.emulated_cpu(tier or tuple(self.architecture.tiers)[-1])

    def _started(
        self, command: list[str], cpu: str | None, environment: Mapping[str, str], folder: Path
    ) -> subprocess.CompletedProcess[str]:
        if cpu is not None:
            prefix = c_library(self.architecture) if self.emulated else None
            command = emulated(self.architecture, cpu, command, prefix=prefix)
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=folder,
            timeout=_RUN_SECONDS if cpu is None else _EMULATED_SECONDS,
        )  # fmt: skip
        if cpu is not None and done.returncode in UNAVAILABLE:
            raise GateError(f"this machine lets no user namespace register binary formats: {done.stderr.strip()}")
        return done

    def _version_problems(self) -> list[str]:
        done = self.run("--version")
        expected = f"trivet {self.manifest['version']}\n"
        out = (
            []
            if (done.returncode, done.stdout) == (0, expected)
            else [f"--version printed {done.stdout!r} with status {done.returncode}"]
        )
        stated = version_file(self.tree)
        if (stated["version"], stated["commit"]) != (self.manifest["version"], self.manifest["source"]["commit"]):
            out.append("VERSION, manifest and --version do not agree")
        return out

    def _help_problems(self) -> list[str]:
        out = []
        for arguments in (["--help"], ["serve", "--help"], ["chat", "--help"], ["verify-self"]):
            done = self.run(*arguments)
            if done.returncode != 0 or not done.stdout.strip() or done.stderr.strip():
                out.append(
                    f"`trivet {' '.join(arguments)}` ended with status {done.returncode}: {done.stderr.strip()[-300:]}"
                )
        return out

    def _server_results(self, model: Path) -> list[GateResult]:
        trace = self.scratch / "trace.txt"
        gates = ("server", "completion", "confinement", "greedy-tokens")
        try:
            seen = self._smoke(model, trace=trace)
            reached = trace_problems(trace.read_text(encoding="utf-8", errors="replace"), (str(self.scratch),))
        except (GateError, OSError, ValueError, subprocess.SubprocessError) as error:
            return [self._result(gate, [f"{type(error).__name__}: {error}"]) for gate in gates]
        left = sorted(path.name for path in (self.scratch / "home").iterdir())
        reached += [f"left {name} in HOME" for name in left]
        reached += (
            [] if seen["interfaces"] == ["lo"] else [f"the network was not closed: {', '.join(seen['interfaces'])}"]
        )
        return [
            self._result("server", server_problems(seen, self.manifest["version"])),
            self._result("completion", [] if all(seen["answers"]) else ["an answer was empty"]),
            self._result("confinement", reached),
            self._result("greedy-tokens", answer_problems(seen["answers"])),
        ]

    def _baseline_result(self, model: Path) -> GateResult:
        """On the least CPU that the manifest promises, emulated: the program sees no more than it, and answers."""
        architecture = self.architecture
        cpu = architecture.baseline_cpus.get(self.manifest["target"]["cpu_baseline"])
        if cpu is None or missing_tools(architecture):
            return self._absent("cpu-baseline", missing_tools(architecture) or "qemu has no such CPU")
        features = json.loads(self.run("doctor", "--json", cpu=cpu).stdout)["cpu"]["features"]
        expected = list(architecture.tiers[architecture.baseline_tier].features)
        problems = [] if features == expected else [f"the run was not emulated: the program saw {', '.join(features)}"]
        arguments = ["complete", "--model", str(model), "--max-tokens", "4", "--temperature", "0", "Water boils at"]
        done = self.run(*arguments, cpu=cpu)
        if done.returncode != 0 or not done.stdout.startswith(" 100"):
            problems.append(f"on {cpu} it ended with status {done.returncode}: {done.stdout!r} {done.stderr[-300:]}")
        for tier in architecture.above(architecture.baseline_tier):
            done = self.run(*arguments, cpu=cpu, tier=tier)
            if done.returncode != 1 or "lacks" not in done.stderr:
                problems.append(f"{tier} is not refused on {cpu}: status {done.returncode}: {done.stderr[-300:]}")
        return replace(self._result("cpu-baseline", problems), emulated=True)

    def _tier_results(self, tier: str, model: Path) -> list[GateResult]:
        """Forced to `tier`: refused cleanly where the CPU lacks it, else executed, and the answers compared."""
        required = self.architecture.tiers[tier].features
        cpu = self._doctor(tier)["cpu"]
        missing = [name for name in required if name not in cpu["features"]]
        if missing:
            reason = f"hardware absent: this CPU lacks {', '.join(missing)}"
            return [self._absent(gate, reason, tier) for gate in _MODEL_TIER_GATES]
        chosen = cpu["selected_tier"]
        details: dict[str, Any] = {"detected": True, "selected": chosen == tier}
        details |= {"emulated_cpu": self._cpu(tier)} if self.emulated else {}
        problems = [] if chosen == tier else [f"forced to {tier}, the program chose {chosen}"]
        try:
            problems += self._execution_problems(tier, model)
            answers = answer_problems(self._smoke(model, tier=tier)["answers"])
        except (GateError, OSError, ValueError, subprocess.SubprocessError) as error:
            problems.append(f"{type(error).__name__}: {error}")
            answers = ["the run failed"]
        return [self._result("tier-run", problems, tier, details), self._result("tier-tokens", answers, tier)]

    def _execution_problems(self, tier: str, model: Path) -> list[str]:
        """Show what really executes: with the instructions of a tier made illegal, it must die and lower ones live."""
        architecture = self.architecture
        out = []
        for poisoned, must_die in ((architecture.marked(architecture.above(tier)), False), ((tier,), True)):
            if not architecture.marked(poisoned):
                continue
            program = self._poisoned_program(poisoned)
            arguments = ["complete", "--model", str(model), "--max-tokens", "2", "--temperature", "0", "Water boils at"]
            done = self.run(*arguments, tier=tier, program=program)
            if must_die and done.returncode not in _SIGILL:
                out.append(f"{tier} runs without executing its own instructions (status {done.returncode})")
            if not must_die and done.returncode != 0:
                status = f"status {done.returncode} {done.stderr[-200:]}"
                out.append(f"{tier} executes instructions of {' or '.join(poisoned)}, or fails: {status}")
        return out

    def _poisoned_program(self, tiers: tuple[str, ...]) -> Path:
        copy = self.scratch / ("poisoned-" + "-".join(tiers))
        if not copy.exists():
            shutil.copytree(self.tree, copy, symlinks=True)
            library, architecture = self.tree / LIBRARY, self.architecture
            offsets = [offset for tier in tiers for offset in instructions(library, architecture, tier)]
            poison(copy / LIBRARY, offsets, architecture.illegal_instruction)
        return copy / "bin" / "trivet"

    def _tier_code_problems(self, tier: str) -> list[str]:
        """Whether the op library holds the tier, and asks for exactly the CPU features that the manifest names."""
        required = self._library_tiers
        if tier not in required:
            return [f"the op library has no tier {tier}; it has {', '.join(required)}"]
        out = []
        (listed,) = [item["cpu_features"] for item in self.manifest["cpu_tiers"] if item["name"] == tier]
        if sorted(required[tier]) != sorted(listed):
            out.append(f"the op library asks for {required[tier]} on {tier}, the manifest names {listed}")
        if self.architecture.marked((tier,)) and not instructions(self.tree / LIBRARY, self.architecture, tier):
            out.append(f"the op library holds no instruction of {tier}")
        return out

    @cached_property
    def _library_tiers(self) -> dict[str, list[str]]:
        """Tier -> CPU features that the op library asks for."""
        if not self.emulated:
            return library_tiers(self.tree / LIBRARY)
        # The program says what a CPU lacks for each tier; what the least one has of the rest cannot be told from there.
        cpu = self._doctor(self.architecture.baseline_tier)["cpu"]
        had = {name: set(tier.features) & set(cpu["features"]) for name, tier in self.architecture.tiers.items()}
        return {name: [*had[name], *facts["missing_features"]] for name, facts in cpu["tiers"].items()}

    def _doctor(self, tier: str) -> dict[str, Any]:
        """What the program says of the CPU and of itself when it is forced to `tier`."""
        found: dict[str, Any] = json.loads(self.run("doctor", "--json", tier=tier).stdout)
        return found

    def _smoke(self, model: Path, *, tier: str | None = None, trace: Path | None = None) -> dict[str, Any]:
        command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-m", "release.smoke"]
        command += [str(self.program), str(model), str(self.scratch), str(REFERENCE)]
        command += ["--trace", str(trace)] if trace is not None else []
        environment = {"PATH": "/usr/bin:/bin"} | ({"TRIVET_CPU_TIER": tier} if tier else {})
        done = self._started(command, self._cpu(tier), environment, ROOT)
        if done.returncode != 0:
            raise GateError(f"the server run failed: {done.stderr.strip()[-600:]}")
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen


def server_problems(seen: Mapping[str, Any], version: str) -> list[str]:
    expected = {"health": 200, "version": version, "exit_status": 0}
    return [
        f"{name} is {seen.get(name)}, expected {value}" for name, value in expected.items() if seen.get(name) != value
    ]


def answer_problems(answers: list[str]) -> list[str]:
    """Answers that do not begin as the recorded ones."""
    cases = json.loads(REFERENCE.read_text(encoding="utf-8"))["cases"]
    if len(answers) != len(cases):
        return [f"{len(answers)} answers to {len(cases)} prompts"]
    return [
        f"{case['prompt']!r} was continued with {answer!r}, expected {case['text']!r}"
        for answer, case in zip(answers, cases, strict=True)
        if not answer.startswith(case["text"])
    ]


def library_tiers(library: Path) -> dict[str, list[str]]:
    """Tier -> CPU features that the library asks for; loads it, so only for the architecture of this machine."""
    describe = ctypes.CDLL(str(library)).trivet_cpu_describe
    describe.argtypes, describe.restype = [ctypes.c_char_p], ctypes.c_char_p
    tiers: dict[str, list[str]] = json.loads(describe(b""))["tiers"]
    return tiers
