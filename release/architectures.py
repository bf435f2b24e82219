"""What the release tools know of each CPU architecture: its tiers, the CPUs that stand for it, its tools."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import GateError

KERNELS = ("matmul", "paged_attention", "rms_norm", "sample")


@dataclass(frozen=True, slots=True)
class Tier:
    features: tuple[str, ...]  # of the CPU, as `trivet doctor` names them
    os_state: str = "none beyond the ABI"  # what the operating system must save on a context switch
    # What instructions of its own look like in a disassembly; None = it has none.
    mark: re.Pattern[str] | None = None
    kernels: tuple[str, ...] = KERNELS  # that have code of their own for it; the others take the tier below


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str  # as the kernel calls it
    debian: str  # as Debian calls it
    triplet: str  # as compilers call it
    elf_machine: int
    illegal_instruction: bytes  # ends in SIGILL, always
    tiers: Mapping[str, Tier]  # from the least to the best
    baseline_tier: str  # what every CPU of this architecture can run
    baseline_cpus: Mapping[str, str]  # least CPU of a manifest -> the model of qemu that stands for it
    # Model of qemu -> the best tier there, from the least to the richest; empty = programs are run natively only.
    best_tiers: Mapping[str, str]
    wheel_baseline: tuple[str, str]  # least CPU of a bundle of wheels, and why
    wheel_platforms: tuple[str, ...]  # platform tags of wheels that an archive may be made of

    @property
    def is_native(self) -> bool:
        return platform.machine() == self.name

    def tool(self, name: str) -> str:
        """A program of the compiler or of binutils for it."""
        return name if self.is_native else f"{self.triplet}-{name}"

    @property
    def qemu(self) -> str:
        return f"qemu-{self.name}-static"

    def marked(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the tiers that have instructions of their own."""
        return tuple(name for name in names if self.tiers[name].mark is not None)

    def above(self, tier: str) -> tuple[str, ...]:
        names = tuple(self.tiers)
        return names[names.index(tier) + 1 :]

    def emulated_cpu(self, tier: str) -> str:
        """The model on which a program takes this tier, or if there is none the poorest one that has it."""
        names = list(self.tiers)
        able = {cpu: best for cpu, best in self.best_tiers.items() if names.index(best) >= names.index(tier)}
        if not able:
            raise GateError(f"no emulated CPU is known to have {tier}")
        return next((cpu for cpu, best in able.items() if best == tier), next(iter(able)))


_AVX2 = ("sse2", "avx2", "fma", "f16c")
_AVX512_VNNI = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")

ARCHITECTURES: Mapping[str, Architecture] = {
    "x86_64": Architecture(
        name="x86_64",
        debian="amd64",
        triplet="x86_64-linux-gnu",
        elf_machine=62,
        illegal_instruction=b"\x0f\x0b",  # ud2
        tiers={
            "scalar": Tier(()),
            "baseline": Tier(("sse2",)),
            "avx2": Tier(_AVX2, "XCR0: SSE, AVX", re.compile(r"%ymm\d")),
            "avx_vnni": Tier(
                (*_AVX2, "avx_vnni"), "XCR0: SSE, AVX", re.compile(r"^\{vex\} vpdpbusd\s"), kernels=("matmul",)
            ),
            "avx512_vnni": Tier(_AVX512_VNNI, "XCR0: SSE, AVX, opmask, ZMM", re.compile(r"%zmm\d")),
        },
        baseline_tier="baseline",
        baseline_cpus={"x86-64": "Opteron_G1", "x86-64-v2": "Nehalem"},
        best_tiers={},
        wheel_baseline=("x86-64-v2", "numpy's wheel is compiled for x86-64-v2; the op library itself needs SSE2"),
        wheel_platforms=("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"),
    ),
    "aarch64": Architecture(
        name="aarch64",
        debian="arm64",
        triplet="aarch64-linux-gnu",
        elf_machine=183,
        illegal_instruction=b"\0\0\0\0",  # udf #0
        tiers={
            "scalar": Tier(()),
            "neon": Tier(("asimd",)),
            "dotprod": Tier(("asimd", "asimddp"), mark=re.compile(r"^[su]dot\s"), kernels=("matmul",)),
            "i8mm": Tier(
                ("asimd", "asimddp", "i8mm"), mark=re.compile(r"^(us?|s)mmla\s|^(us|su)dot\s"), kernels=("matmul",)
            ),
        },
        baseline_tier="neon",
        baseline_cpus={"armv8-a": "cortex-a53"},
        best_tiers={"cortex-a53": "neon", "cortex-a76": "dotprod", "max": "i8mm"},
        wheel_baseline=("armv8-a", "wheels and op library are compiled for ARMv8-A; more is chosen at run time"),
        wheel_platforms=(
            "manylinux_2_28_aarch64",
            "manylinux_2_27_aarch64",
            "manylinux_2_17_aarch64",
            "manylinux2014_aarch64",
        ),
    ),
}


def architecture_of(name: str) -> Architecture:
    """The entry; GateError for an architecture that no archive is built for."""
    if name not in ARCHITECTURES:
        raise GateError(f"nothing is known of CPUs of {name}; there are entries for {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
