"""Runs x86-64 programs on an emulated CPU, with all their children.

`qemu-x86_64 PROGRAM` alone proves nothing: the bootloader executes itself again, and the child runs natively. Here a
private user and mount namespace has a binfmt_misc of its own (Linux 6.7 or newer) that sends all programs to qemu.
"""

from __future__ import annotations

import shutil
from pathlib import Path

QEMU = "qemu-x86_64-static"
# The least CPU of each baseline that qemu knows.
CPU_OF_BASELINE = {"x86-64": "Opteron_G1", "x86-64-v2": "Nehalem"}

# ELF, 64-bit, little-endian, System V ABI (qemu itself is marked GNU and is not matched), any type, x86-64.
_MAGIC = r"\x7fELF\x02\x01\x01\x00" + r"\x00" * 8 + r"\x02\x00\x3e\x00"
_MASK = r"\xff" * 16 + r"\xfe\xff\xff\xff"
_SCRIPT = """
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc || exit 99
echo ':trivet:M::{magic}:{mask}:{qemu}:F' > /proc/sys/fs/binfmt_misc/register || exit 98
exec "$@"
"""
UNAVAILABLE = (98, 99)  # exit statuses of a machine that does not allow it


def emulator() -> Path | None:
    found = shutil.which(QEMU)
    return Path(found) if found else None


def emulated(cpu: str, command: list[str]) -> list[str]:
    """The command that runs `command` on the CPU model `cpu`; only where emulator() found one."""
    script = _SCRIPT.format(magic=_MAGIC, mask=_MASK, qemu=emulator())
    run = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash"]
    return ["env", f"QEMU_CPU={cpu}", *run, *command]
