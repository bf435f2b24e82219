"""Start-up and memory of trivet beside its peers: process start to first token, resident bytes, import and --help.

    python bench/startup.py --peer llama-cpp=/envs/llama/bin/python --model models/smollm2-135m-instruct-q4_1.gguf

The page cache is warm and trivet's package is made before anything is timed. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from compare import MAX_NOISE, add_peer_flags, parse_peer_model, refuse_noise, spread
from engines import EngineError, EngineProcess, EngineSpec, environment_of, own_engine, parse_peer
from noise import Meter, load_average

_PROMPT_TOKENS = 16


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    try:
        return _measure(args)
    except EngineError as error:
        print(f"startup: {error}", file=sys.stderr)
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], type=Path, help="GGUF file; may be repeated")
    add_peer_flags(parser)
    parser.add_argument("--rounds", type=int, default=5, help="starts of every engine (default: 5)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--context", type=int, default=4096, help="tokens of context (default: 4096)")
    parser.add_argument("--fill", type=int, default=2048, help="prompt before the peak is read (default: 2048)")
    parser.add_argument("--allow-noise", action="store_true", help="run on a busy machine, and mark what it spoils")
    parser.add_argument("--output", type=Path, help="default: startup-DATE.json")
    args = parser.parse_args(argv)
    if args.rounds < 1 or not 1 <= args.fill < args.context:
        parser.error("--rounds must be 1 or more, and --fill from 1 to less than --context")
    return args


def _measure(args: argparse.Namespace) -> int:
    specs = [own_engine(), *map(parse_peer, args.peer)]
    for spec in specs:
        spec.check()
    peer_models = dict(map(parse_peer_model, args.peer_model))
    noise = refuse_noise(allowed=args.allow_noise)
    report: dict[str, Any] = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "noise_before": noise,
        "load_average_before": load_average(),
        "config": {name: str(value) for name, value in vars(args).items()},
        "commands": _commands(args.rounds),
        "models": [_model(path, specs, peer_models, args) for path in args.model],
    }
    output = args.output or Path(f"startup-{datetime.now():%Y%m%d-%H%M%S}.json")
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {output}", file=sys.stderr)
    return 0


def _commands(rounds: int) -> dict[str, Any]:
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
    result = {name: spread(values[1:]) for name, values in seconds.items()}
    for name, values in result.items():
        print(f"{name:<18}{1e3 * values['min']:8.0f}{1e3 * values['median']:8.0f}{1e3 * values['max']:8.0f} ms")
    return result


def _model(
    path: Path, specs: Sequence[EngineSpec], peer_models: dict[tuple[str, str], Path], args: argparse.Namespace
) -> dict[str, Any]:
    if not path.is_file():
        raise EngineError(f"--model {path}: no such file")
    size = path.stat().st_size
    starts: dict[str, list[dict[str, Any]]] = {spec.name: [] for spec in specs}
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as folder:
        for index in range(args.rounds + 1):  # the first one makes the package and fills the page cache
            for spec in specs:
                loaded = peer_models.get((spec.name, path.stem), path)
                start = _start(spec, loaded, Path(folder) / f"{spec.name}.log", args, fill=index == args.rounds)
                if index > 0:
                    starts[spec.name].append(start)
    result: dict[str, Any] = {"model": path.name, "bytes": size, "engines": {}}
    print(f"\n{path.name}, {size / 1e6:.0f} MB: start to first token (s, min median max; ! = noisy), resident MB")
    for name, runs in starts.items():
        seconds = spread([run["first_token_seconds"] for run in runs])
        noisy = max(run["noise"] for run in runs) > MAX_NOISE
        early = {key: statistics.median(run["memory"][key] for run in runs) for key in runs[0]["memory"]}
        filled = runs[-1]["memory_filled"]
        result["engines"][name] = {
            "first_token_seconds": seconds, "noisy": noisy, "memory": early, "memory_filled": filled,
            "load_seconds": spread([run["load_seconds"] for run in runs]),
        }  # fmt: skip
        print(
            f"{name:<18}{seconds['min']:7.2f}{seconds['median']:7.2f}{seconds['max']:7.2f}{'!' if noisy else ' '}"
            f"  peak {filled['peak_rss'] / 1e6:.0f} ({filled['peak_rss'] / size:.2f}x the file), "
            f"anonymous {filled['anonymous_rss'] / 1e6:.0f}, after the first token {early['anonymous_rss'] / 1e6:.0f}",
            flush=True,
        )
    return result


def _start(spec: EngineSpec, path: Path, log: Path, args: argparse.Namespace, *, fill: bool) -> dict[str, Any]:
    """One process from its start to its first token; with `fill`, its memory after a long prompt too."""
    with Meter() as meter:
        start = time.perf_counter()
        engine = EngineProcess(spec, log=log)
        meter.pid = engine.pid
        try:
            loaded = engine.ask("load", model=str(path), threads=args.threads, context=args.context)
            engine.ask("first_token", tokens=_PROMPT_TOKENS)
            seconds = time.perf_counter() - start
            memory = engine.ask("memory")
        except BaseException:
            engine.close()
            raise
    filled = None
    if fill:
        engine.ask("first_token", tokens=args.fill)
        filled = engine.ask("memory")
    engine.close()
    return {
        "first_token_seconds": seconds,
        "load_seconds": loaded["seconds"],
        "memory": memory,
        "memory_filled": filled,
        "noise": meter.noise,
    }


if __name__ == "__main__":
    sys.exit(main())
