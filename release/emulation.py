"""Runs programs on an emulated CPU, with all their children.

`qemu-x86_64 PROGRAM` alone proves nothing: the bootloader executes itself again, and the child runs natively. Here a
private user and mount namespace has a binfmt_misc of its own (Linux 6.7 or newer) that sends all programs of the
architecture to qemu.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from .architectures import Architecture
from .errors import GateError

UNAVAILABLE = (98, 99)  # exit statuses of a machine that does not allow it
_SCRIPT = """
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc || exit 99
echo ':trivet:M::{magic}:{mask}:{qemu}:F' > /proc/sys/fs/binfmt_misc/register || exit 98
{setup}
exec "$@"
"""
# What the kernel tells of this machine's CPUs is not of the emulated one; onnxruntime for Arm ends in SIGSEGV over it.
_HIDE_CPUS = "mount -t tmpfs tmpfs /sys || exit 99\n"


def missing_tools(architecture: Architecture) -> str:
    """What an emulated run lacks on this machine, for people; empty if nothing."""
    if shutil.which(architecture.qemu) is None:
        return f"{architecture.qemu} is not installed (Debian: qemu-user-static)"
    if not architecture.is_native and not c_library(architecture).is_dir():
        return f"the C library of {architecture.name} is not installed (Debian: libc6-{architecture.debian}-cross)"
    return ""


def c_library(architecture: Architecture) -> Path:
    """Where cross compilers have the C library of a foreign architecture; qemu looks for the program's there first."""
    return Path("/usr", architecture.triplet)


def emulated(
    architecture: Architecture, cpu: str, command: list[str], *, setup: str = "", prefix: Path | None = None
) -> list[str]:
    """The command that runs `command` with every program of the architecture on the CPU model `cpu`.

    `setup`: shell commands before it, in the namespace; `prefix`: its files stand before those of the system.
    """
    qemu = shutil.which(architecture.qemu)
    if qemu is None:
        raise GateError(missing_tools(architecture))
    machine = rf"\x{architecture.elf_machine:02x}\x00"
    # ELF, 64-bit, little-endian, any type. On x86-64 qemu itself is of the same machine, but marked as of the GNU ABI.
    abi_mask = r"\xff" if architecture.is_native else r"\x00"
    script = _SCRIPT.format(
        magic=r"\x7fELF\x02\x01\x01\x00" + r"\x00" * 8 + r"\x02\x00" + machine,
        mask=r"\xff" * 7 + abi_mask + r"\xff" * 8 + r"\xfe\xff\xff\xff",
        qemu=qemu,
        setup=setup if architecture.is_native else _HIDE_CPUS + setup,
    )
    settings = [f"QEMU_CPU={cpu}", *([f"QEMU_LD_PREFIX={prefix}"] if prefix else [])]
    return [
        "env", *settings, "unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash", *command
    ]  # fmt: skip
