"""The machine that a figure belongs to, and how busy it was."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    from ... import __version__

    return {
        "trivet": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "num_cpus": usable_cpus(),
        "load_average": load_average(),
    }


def usable_cpus() -> int:
    with suppress(AttributeError):  # only Linux has it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float | None:
    """Runnable processes over the last minute; None where the system does not say."""
    with suppress(AttributeError, OSError):
        return os.getloadavg()[0]
    return None


def peak_memory(pid: int | None = None) -> dict[str, int] | None:
    """Resident bytes of a process: at most, now, and backed by no file. None where the system does not say."""
    names = {"VmHWM": "peak_rss_bytes", "VmRSS": "rss_bytes", "RssAnon": "anonymous_rss_bytes"}
    found = {}
    with suppress(OSError):
        for line in Path(f"/proc/{'self' if pid is None else pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in names:
                found[names[key]] = int(value.split()[0]) * 1024
    return found or None


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
