"""How busy the machine is with what is not measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
NUM_CPUS = os.cpu_count() or 1


def _machine_seconds() -> float:
    """CPU seconds that the machine has spent on anything, time taken by the hypervisor included."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle, waiting = fields[3], fields[4]
    return (sum(fields) - idle - waiting) / _TICKS


def _process_seconds(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS


@dataclass(slots=True)
class Meter:
    """`with Meter(pid) as meter:` ... then `meter.noise`: share of the machine that others used meanwhile, in [0, 1].

    pid None: everything but this process is noise.
    """

    pid: int | None = None
    seconds: float = 0.0
    noise: float = 0.0
    _before: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __enter__(self) -> Meter:
        self._before = self._read()
        return self

    def __exit__(self, *exc_info: object) -> None:
        before, after = self._before, self._read()
        self.seconds = after[0] - before[0]
        foreign = (after[1] - before[1]) - (after[2] - before[2])
        self.noise = max(0.0, foreign / max(self.seconds, 1e-9) / NUM_CPUS)

    def _read(self) -> tuple[float, float, float]:
        own = _process_seconds(os.getpid())
        return time.perf_counter(), _machine_seconds(), own + (_process_seconds(self.pid) if self.pid else 0.0)


def idle_noise(seconds: float = 1.0) -> float:
    """Share of the machine in use while we do nothing."""
    with Meter() as meter:
        time.sleep(seconds)
    return meter.noise


def load_average() -> float:
    return os.getloadavg()[0]
