"""Times steps of the op library where its threads do not have the cores they would like: no scenario may collapse.

    python tests/tools/bench_oversubscription.py [--steps 200] [--scenarios "twice the threads;busy neighbour"]

A step is a decode step's worth of parallel regions: one row through `--nodes` QMatMul of the shapes of a 135M model.
Every scenario runs in processes of its own and prints the median, the 99th percentile and the longest step, the CPU
time per step over all threads (what spinning would inflate), and the median's ratio to the fair share: what one thread
on its own would take, spread over the cores that the scenario leaves it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime as ort
from bench_ops import build_session  # puts trivet on the path
from trivet.backends.library import probe_cpu

CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    threads: int
    cores: float  # that one engine gets when the machine is shared fairly
    engines: int = 1  # in one process, stepping at the same time
    processes: int = 1
    neighbours: int = 0  # processes that only spin
    late_affinity: bool = False  # one core, taken away after the pool has been made
    suspend: bool = False  # for half a second in the middle


SCENARIOS = (
    Scenario("one thread", 1, 1),
    Scenario("a thread per core", CORES, CORES),
    Scenario("twice the threads", 2 * CORES, CORES),
    Scenario("eight times the threads", 8 * CORES, CORES),
    Scenario("two engines, one process", CORES, CORES / 2, engines=2),
    Scenario("two processes", CORES, CORES / 2, processes=2),
    Scenario("busy neighbour", CORES, CORES / 2, neighbours=CORES),
    Scenario("one core is left", CORES, 1, late_affinity=True),
    Scenario("suspended", CORES, CORES, suspend=True),
)


def run_engine(args: argparse.Namespace) -> None:
    """The measured process: prints the seconds of every step and the CPU seconds of all of them, as JSON."""
    tier = str(probe_cpu()["best_tier"])
    x = np.random.default_rng(0).standard_normal((1, 576), dtype=np.float32)
    sessions = [build_session("q4_1", 1536, 576, args.nodes, tier, args.threads, "int8") for _ in range(args.engines)]
    for session in sessions:
        session.run(None, {"x": x})
    if args.late_affinity:
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), {min(os.sched_getaffinity(0))})
    seconds: list[float] = []

    def step(session: ort.InferenceSession, count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            session.run(None, {"x": x})
            seconds.append(time.perf_counter() - start)

    print("ready", flush=True)
    sys.stdin.readline()
    cpu = time.process_time()
    workers = [threading.Thread(target=step, args=(session, args.steps)) for session in sessions]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(json.dumps({"seconds": seconds, "cpu": time.process_time() - cpu}), flush=True)


def start_engine(scenario: Scenario, steps: int, nodes: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), "--engine", f"--steps={steps}", f"--nodes={nodes}"]
    command += [f"--threads={scenario.threads}", f"--engines={scenario.engines}"]
    command += ["--late-affinity"] if scenario.late_affinity else []
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(scenario: Scenario, steps: int, nodes: int) -> tuple[list[float], float]:
    """Seconds per step, of all engines, and CPU seconds per step."""
    spin = [sys.executable, "-c", "while True: pass"]
    neighbours = [subprocess.Popen(spin, text=True) for _ in range(scenario.neighbours)]
    engines = [start_engine(scenario, steps, nodes) for _ in range(scenario.processes)]
    try:
        for engine in engines:
            assert engine.stdout is not None
            engine.stdout.readline()
        for engine in engines:
            assert engine.stdin is not None
            engine.stdin.write("go\n")
            engine.stdin.flush()
        if scenario.suspend:
            time.sleep(0.1)
            engines[0].send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            engines[0].send_signal(signal.SIGCONT)
        results = [json.loads(engine.communicate(timeout=300)[0]) for engine in engines]
    finally:
        for process in (*engines, *neighbours):
            process.kill()
            process.wait()
    seconds = [second for result in results for second in result["seconds"]]
    return sorted(seconds), sum(result["cpu"] for result in results) / len(seconds)


def report(scenarios: Sequence[Scenario], steps: int, nodes: int, show: Callable[[str], None]) -> None:
    alone = measure(SCENARIOS[0], steps, nodes)[0][0]
    show(f"{CORES} cores; the fastest step of one thread: {alone * 1e3:.2f} ms")
    show(f"{'scenario':26} {'threads':>7} {'median':>9} {'p99':>9} {'longest':>9} {'CPU/step':>9} {'of fair':>8}")
    for scenario in scenarios:
        seconds, cpu = measure(scenario, steps, nodes)
        median, p99 = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
        show(
            f"{scenario.name:26} {scenario.threads:7} {median * 1e3:6.2f} ms {p99 * 1e3:6.2f} ms "
            f"{seconds[-1] * 1e3:6.1f} ms {cpu * 1e3:6.2f} ms {median / (alone / scenario.cores):7.2f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=120, help="parallel regions per step")
    parser.add_argument("--scenarios", default=";".join(s.name for s in SCENARIOS[1:]), help="names, joined by ';'")
    for flag, kind in (("--threads", int), ("--engines", int)):
        parser.add_argument(flag, type=kind, default=1, help=argparse.SUPPRESS)
    for flag in ("--engine", "--late-affinity"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        return run_engine(args)
    known = {scenario.name: scenario for scenario in SCENARIOS}
    wanted = args.scenarios.split(";")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"unknown scenarios {unknown}; known: {list(known)}")
    report([known[name] for name in wanted], args.steps, args.nodes, print)


if __name__ == "__main__":
    main()
