"""Whole models on one NVIDIA GPU, side by side: trivet, llama.cpp with CUDA, and transformers with torch in bfloat16.

    python bench/cuda_peers.py --models FOLDER --llama-cpp BIN --torch PYTHON --json FILE

Models have random weights; those that FOLDER lacks are made there (random_gguf.py). BIN holds llama-bench,
llama-batched-bench and llama-completion of a llama.cpp that was built for the GPU; PYTHON has torch, transformers and
gguf. A peer that is not named is left out. Engines take turns, --rounds times. Prints a table, whose last column is the
ratio to llama.cpp that trivet is meant to reach, and writes all figures to FILE after every part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

_BENCH = Path(__file__).resolve().parent
_SESSION = _BENCH.parent / "tests" / "tools" / "bench_cuda_model.py"
_PLAN = (  # shape, mix of formats; the ones that matter most first
    ("llama3.1-8b", "q4_k_m"),
    ("llama3.2-1b", "q4_k_m"),
    ("llama3.1-8b", "q8_0"),
    ("llama3.1-8b", "bf16"),
    ("qwen3-4b", "q4_k_m"),
    ("llama3.2-1b", "q8_0"),
)
_START = "llama3.1-8b-q4_k_m"
_MEASURES = {
    "decode": "decode_tokens_per_s",
    "decode 64": "decode_64_tokens_per_s",
    "prefill 2048": "prefill_tokens_per_s",
}
_BARS = {  # measure -> beginning of the model's name -> trivet's speed over llama.cpp's that is aimed at
    "decode": {"llama3.1-8b": 1.25, "llama3.2-1b": 1.5},
    "decode 64": {"llama3.1-8b-bf16": 3.0},
    "prefill 2048": {"llama3.1-8b": 1.2},
    "start": {"llama3.1-8b": 1.0},
}
_PROMPT = "The engines start, and the one that answers first wins."
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Engines:
    """One method per engine and measurement; a peer that is not there has no figures."""

    llama_cpp: Path | None
    torch: str | None
    timeout: float = 300.0
    failures: list[str] = field(default_factory=list)

    def _output(self, *command: str | Path) -> str:
        """Standard output of a command; "" when it failed, which is noted."""
        try:
            done = subprocess.run(
                list(map(str, command)), env=_environment(), capture_output=True, text=True, timeout=self.timeout,
                check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            self.failures.append(str(error)[:300])
            return ""
        if done.returncode != 0:
            self._note(command[0], done.returncode, done.stderr or done.stdout)
            return ""
        return done.stdout

    def _note(self, program: str | Path, status: int, said: str) -> None:
        self.failures.append(f"{Path(program).name} ended with status {status}: {said.strip()[-600:]}")

    def trivet(self, model: Path) -> Figures:
        return last_object(self._output(sys.executable, _SESSION, model))

    def llama(self, model: Path) -> Figures:
        """The same prompts, contexts and numbers of sequences as trivet's; the faster of two micro-batches."""
        if self.llama_cpp is None:
            return {}
        common: list[str | Path] = ["-m", model, "-ngl", "99", "-fa", "on"]
        bench = [self.llama_cpp / "llama-bench", *common, "-o", "json", "-r", "3"]
        prompt = json.loads(self._output(*bench, "-p", "2048", "-n", "0", "-ub", "512,2048") or "[]")
        alone = json.loads(self._output(*bench, "-p", "0", "-n", "60", "-d", "512") or "[]")
        many = [self.llama_cpp / "llama-batched-bench", *common, "-c", "20480", "-npp", "256", "-ntg", "32"]
        batch = last_object(self._output(*many, "-npl", "64", "-b", "2048", "-ub", "2048", "--output-format", "jsonl"))
        figures: Figures = {}
        if prompt:
            figures["prefill_tokens_per_s"] = max(run["avg_ts"] for run in prompt)
        if alone:
            figures["decode_tokens_per_s"] = alone[0]["avg_ts"]
        if batch:
            figures["decode_64_tokens_per_s"] = batch["speed_tg"]
        return figures

    def transformers(self, shape: str) -> Figures:
        """Plain, and decode once more through torch.compile."""
        assert self.torch is not None
        figures = last_object(self._output(self.torch, _BENCH / "cuda_transformers.py", shape))
        compiled = last_object(self._output(self.torch, _BENCH / "cuda_transformers.py", shape, "--compile"))
        return figures | {f"compiled_{key}": compiled[key] for key in compiled if key.endswith("_per_s")}

    def start_trivet(self, model: Path) -> Figures:
        return self._first_output(
            sys.executable, "-m", "trivet", "run", "--raw", "--device", "cuda", "--require-gpu", "--max-model-len",
            "4096", "--max-tokens", "2", "--ignore-eos", "--temperature", "0", "-m", model, _PROMPT,
        )  # fmt: skip

    def start_llama(self, model: Path) -> Figures:
        if self.llama_cpp is None:
            return {}
        return self._first_output(
            self.llama_cpp / "llama-completion", "-m", model, "-ngl", "99", "-fa", "on", "-c", "4096", "-no-cnv",
            "--no-display-prompt", "--no-warmup", "-n", "2", "--ignore-eos", "--temp", "0", "-p", _PROMPT,
        )  # fmt: skip

    def _first_output(self, *command: str | Path) -> Figures:
        """Seconds from the start of a process to the first text that it prints, and to its end."""
        started, first = time.perf_counter(), 0.0
        with subprocess.Popen(
            list(map(str, command)), env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, bufsize=0,
        ) as process:  # fmt: skip
            assert process.stdout is not None and process.stderr is not None
            while text := process.stdout.read(64):
                if not first and text.strip():
                    first = time.perf_counter() - started
            said = process.stderr.read().decode(errors="replace")
        if process.returncode != 0 or not first:
            self._note(command[0], process.returncode, said)
            return {}
        return {"first_token_s": first, "end_s": time.perf_counter() - started}


def _environment() -> dict[str, str]:
    paths = [str(_BENCH.parent / "packaging" / "python"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "ORT_DISABLE_TELEMETRY": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def last_object(text: str) -> Figures:
    """The JSON object on the last line that holds one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return dict(json.loads(line))
    return {}


def make_models(folder: Path, plan: Sequence[tuple[str, str]]) -> dict[str, Path]:
    """Name -> file. What is missing is made, by a process for each file."""
    files = {f"{shape}-{mix}": folder / f"{shape}-{mix}.gguf" for shape, mix in plan}
    makers: list[subprocess.Popen[bytes]] = []
    for (shape, mix), path in zip(plan, files.values(), strict=True):
        if not path.exists():
            options = ["--shape", shape, "--format", mix, "--out", str(path)]
            makers.append(subprocess.Popen([sys.executable, str(_BENCH / "random_gguf.py"), *options]))
    statuses = [maker.wait() for maker in makers]
    if any(statuses):
        raise SystemExit("cuda_peers: a model could not be made")
    return files


class Report:
    """What was measured, in the file `path` after every part."""

    def __init__(self, path: Path, failures: list[str], minutes: float) -> None:
        self.figures: dict[str, dict[str, Any]] = {"models": {}, "start": {}, "first start": {}, "transformers": {}}
        self._path = path
        self._failures = failures
        self._skipped: list[str] = []
        self._deadline = time.monotonic() + 60 * minutes

    def add(self, section: str, model: str, runs: Mapping[str, Callable[[], Figures]]) -> None:
        """One run of each engine, unless the time is over."""
        if time.monotonic() > self._deadline:
            self._skipped.append(f"{section}: {model}")
            return
        started = time.monotonic()
        results = self.figures[section].setdefault(model, {name: [] for name in runs})
        for name, run in runs.items():
            results[name].append(run())
        print(f"{section}: {model}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        everything = self.figures | {"failures": self._failures, "skipped": self._skipped}
        self._path.write_text(json.dumps(everything, indent=1) + "\n")

    def table(self) -> str:
        lines = ["| model | measure | trivet | llama.cpp | ratio | bar |", "|---|---|---|---|---|---|"]
        for model, engines in self.figures["models"].items():
            lines += [_line(model, measure, engines, key, " tokens/s") for measure, key in _MEASURES.items()]
        for model, engines in self.figures["start"].items():
            lines.append(_line(model, "start", engines, "first_token_s", " s"))
        for model, engines in self.figures["models"].items():
            if own := [run for run in engines["trivet"] if run]:
                lines.append(
                    f"\n{model}: decode reads {own[-1]['decode_gb_per_s']:.0f} GB/s of weights, a copy moves "
                    f"{own[-1]['copy_gb_per_s']:.0f}; prompts: {own[-1]['prefill_tflops']:.0f} TFLOP/s of products"
                )
        for shape, engines in self.figures["transformers"].items():
            lines.append(f"\ntransformers, {shape}: {json.dumps(engines['transformers'][-1])}")
        lines += [f"\nNOT MEASURED for time: {', '.join(self._skipped)}"] if self._skipped else []
        return "\n".join([*lines, *(f"\nFAILED {failure}" for failure in self._failures)])


def median_of(runs: Sequence[Figures], key: str) -> float | None:
    values = [run[key] for run in runs if key in run]
    return statistics.median(values) if values else None


def _line(model: str, measure: str, engines: dict[str, list[Figures]], key: str, unit: str) -> str:
    own, peer = median_of(engines["trivet"], key), median_of(engines["llama.cpp"], key)
    bar = next((bar for name, bar in _BARS.get(measure, {}).items() if model.startswith(name)), None)
    cells = [f"{value:.4g}{unit}" if value else "-" for value in (own, peer)]
    ratio = (peer / own if measure == "start" else own / peer) if own and peer else None
    cells.append(f"{ratio:.2f}" if ratio else "-")
    return f"| {model} | {measure} | {' | '.join(cells)} | {bar or ''} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, type=Path, help="folder of the models, 36 GB for all of them")
    parser.add_argument("--llama-cpp", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--torch", help="a Python that has torch, transformers and gguf")
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--only", default="", help="models that begin with one of these, separated by commas")
    parser.add_argument("--parts", default="models,start,transformers", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing after so long (default: 60)")
    args = parser.parse_args(argv)
    plan = [item for item in _PLAN if "-".join(item).startswith(tuple(args.only.split(",")))]
    files = make_models(args.models, plan)
    engines = Engines(args.llama_cpp, args.torch)
    report = Report(args.json, engines.failures, args.minutes)
    parts = args.parts.split(",")
    for number in range(args.rounds + 1):
        if number and "models" in parts:
            for name, file in files.items():
                runs = {"trivet": partial(engines.trivet, file), "llama.cpp": partial(engines.llama, file)}
                report.add("models", name, runs)
        if "start" in parts and _START in files:  # the first start makes trivet's package
            file = files[_START]
            runs = {"trivet": partial(engines.start_trivet, file), "llama.cpp": partial(engines.start_llama, file)}
            report.add("start" if number else "first start", _START, runs)
    if "transformers" in parts and args.torch:
        for shape in dict.fromkeys(shape for shape, _ in plan):
            report.add("transformers", shape, {"transformers": partial(engines.transformers, shape)})
    print(report.table())
    return 1 if engines.failures else 0


if __name__ == "__main__":
    sys.exit(main())
