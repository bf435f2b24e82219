"""Cells that need processes of their own: start to first token, and peak memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import EngineError, EngineProcess, EngineSpec, environment_of
from measure import MAX_NOISE, spread
from noise import Meter

_PROMPT_TOKENS = 16
_STATUS_KEYS = {"VmHWM": "peak_rss", "RssAnon": "anonymous"}


@dataclass(frozen=True, slots=True)
class FreshOptions:
    rounds: int
    threads: int
    context: int  # tokens that the KV cache must hold
    fill: int  # tokens of the prompt before the peak is read


def measure_commands(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of the interpreter alone, of `import trivet` and of `trivet --help`."""
    commands = {
        "python -c pass": ["-c", "pass"],
        "import trivet": ["-c", "import trivet"],
        "trivet --help": ["-m", "trivet", "--help"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds + 1):  # the first one fills the page cache
        for name, arguments in commands.items():
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, *arguments], env=environment_of("trivet"), stdout=subprocess.DEVNULL, check=False
            )
            seconds[name].append(time.perf_counter() - start)
            if done.returncode != 0:
                raise EngineError(f"`{name}` ended with status {done.returncode}")
    return {name: spread(values[1:]) for name, values in seconds.items()}


def measure_start(specs: Sequence[EngineSpec], paths: Mapping[str, Path], options: FreshOptions) -> dict[str, Any]:
    """Seconds from a process's start to its first token, and of loading alone; the page cache is warm."""
    starts: dict[str, list[dict[str, Any]]] = {spec.name: [] for spec in specs}
    failed: dict[str, str] = {}
    for index in range(options.rounds + 1):  # the first one makes the package and fills the page cache
        for spec in specs:
            if spec.name in failed:
                continue
            try:
                run = _start(spec, paths[spec.name], options)
            except EngineError as error:
                if spec.name == "trivet":
                    raise
                failed[spec.name] = str(error)
                continue
            if index > 0:
                starts[spec.name].append(run)
    engines: dict[str, dict[str, Any]] = {name: {"unsupported": reason} for name, reason in failed.items()}
    for name in starts.keys() - failed.keys():
        runs = starts[name]
        engines[name] = {
            "seconds": spread([run["seconds"] for run in runs]),
            "load_seconds": spread([run["load_seconds"] for run in runs]),
            "noisy": max(run["noise"] for run in runs) > MAX_NOISE,
        }
    return {"engines": {spec.name: engines[spec.name] for spec in specs}, "ratios": _ratios(starts, failed)}


def _ratios(starts: dict[str, list[dict[str, Any]]], failed: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """trivet's seconds over the peer's, round by round: less is better."""
    return {
        name: spread([a["seconds"] / b["seconds"] for a, b in zip(starts["trivet"], runs, strict=True)])
        for name, runs in starts.items()
        if name != "trivet" and name not in failed
    }


def _start(spec: EngineSpec, path: Path, options: FreshOptions) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as folder:
        with Meter() as meter:
            start = time.perf_counter()
            engine = EngineProcess(spec, log=Path(folder) / "log")
            meter.pid = engine.pid
            try:
                loaded = engine.ask("load", model=str(path), threads=options.threads, context=options.context)
                engine.ask("first_token", tokens=_PROMPT_TOKENS)
                seconds = time.perf_counter() - start
            except BaseException:
                engine.close()
                raise
        engine.close()
    return {"seconds": seconds, "load_seconds": loaded["seconds"], "noise": meter.noise}


def measure_memory(specs: Sequence[EngineSpec], paths: Mapping[str, Path], options: FreshOptions) -> dict[str, Any]:
    """Most resident bytes, and most anonymous ones, of a process that loads and computes a prompt of `fill` tokens."""
    engines: dict[str, dict[str, Any]] = {}
    kv_bytes = 0
    for spec in specs:
        with tempfile.TemporaryDirectory(prefix="trivet-bench-") as folder:
            engine: EngineProcess | None = None
            try:
                _start(spec, paths[spec.name], options)  # makes what only a first load makes: trivet's package
                engine = EngineProcess(spec, log=Path(folder) / "log")
                with MemoryWatch(engine.pid) as watch:
                    engine.ask("load", model=str(paths[spec.name]), threads=options.threads, context=options.context)
                    engine.ask("first_token", tokens=options.fill)
                engines[spec.name] = dict(watch.most)
                if spec.name == "trivet":
                    kv_bytes = engine.ask("cost")["kv_bytes_per_token"] * options.context
            except EngineError as error:
                if spec.name == "trivet":
                    raise
                engines[spec.name] = {"unsupported": str(error)}
                continue
            finally:
                if engine is not None:
                    engine.close()
    return {"engines": engines, "kv_bytes": kv_bytes, "fill": options.fill}


class MemoryWatch:
    """`with MemoryWatch(pid) as watch:` ... then `watch.most`: the largest figures of /proc/PID/status, in bytes."""

    def __init__(self, pid: int, *, period: float = 0.01) -> None:
        self.most = dict.fromkeys(_STATUS_KEYS.values(), 0)
        self._path = Path(f"/proc/{pid}/status")
        self._period = period
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._read()

    def _watch(self) -> None:
        while not self._stopped.wait(self._period):
            self._read()

    def _read(self) -> None:
        with suppress(OSError):  # the process has ended
            for line in self._path.read_text().splitlines():
                key, _, value = line.partition(":")
                if (name := _STATUS_KEYS.get(key)) is not None:
                    self.most[name] = max(self.most[name], int(value.split()[0]) * 1024)
