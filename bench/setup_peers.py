"""Install the peers and make the models that compare.py measures. Done once; what is there is left as it is.

    python bench/setup_peers.py                             every peer, three small models
    python bench/setup_peers.py --peer llama-cpp --model smollm2-135m
    python bench/setup_peers.py --list

Needs python3-venv and, for llama.cpp, cmake and a C++ compiler. A run that was stopped goes on where it was. What
cannot be made is named at the end with its reason and the log, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp_build
from peer_cache import MODELS, PEERS, PeerCache, default_cache, fetched_models, oracle_python

_ROOT = Path(__file__).resolve().parent.parent
_REQUIREMENTS = {  # environment -> what pip installs there; the versions that were compared
    "llama-cpp": ["numpy", "typing-extensions", "diskcache", "jinja2"],
    "onnxruntime-genai": ["onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "numpy"],
    "openvino": ["openvino-genai==2026.4.1.0", "numpy"],
    "convert": ["torch==2.13.0", "transformers>=5.18", "gguf>=0.17", "accelerate", "safetensors", "sentencepiece"],
    "export": [
        "torch==2.13.0", "optimum-intel==2.2.0", "nncf==3.4.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0",
        "onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "onnx", "onnx-ir", "sentencepiece",
    ],
}  # fmt: skip
_MEGABYTES = {"llama-cpp": 400, "onnxruntime-genai": 220, "openvino": 300, "convert": 1500, "export": 2000}
_DEFAULT_MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen3-0.6b")


Command = list[str | Path]


class StepFailed(Exception):
    """A command failed; the message is the end of what it said."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=PEERS, help="may be repeated (default: all)")
    parser.add_argument("--model", action="append", choices=MODELS, help=f"default: {', '.join(_DEFAULT_MODELS)}")
    parser.add_argument("--cache", type=Path, default=default_cache().root, help="default: %(default)s")
    parser.add_argument("--list", action="store_true", help="say what there is and its size, and make nothing")
    args = parser.parse_args(argv)
    cache = PeerCache(args.cache)
    if args.list:
        _list(cache)
        return 0
    return Setup(cache).run(args.peer or PEERS, args.model or _DEFAULT_MODELS)


def _list(cache: PeerCache) -> None:
    for name, megabytes in _MEGABYTES.items():
        print(f"environment {name:<20}{_size(cache.environment(name)) or f'not made, about {megabytes} MB':>28}")
    for name, model in MODELS.items():
        made = [path for path in cache.gguf(name) if path.is_file()]
        state = f"{len(made)} of {len(model.files)} files"
        print(f"model {name:<26}{state if made else f'not made, {model.megabytes} MB':>28}")
        for peer in PEERS[1:]:
            print(f"  int4 export for {peer:<20}{_size(cache.export(peer, name)) or 'not made':>24}")


def _size(path: Path) -> str:
    if not path.exists():
        return ""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return f"{sum(file.stat().st_size for file in files) / 1e6:.0f} MB"


class Setup:
    """Makes things in order and remembers what failed, so that one failure leaves the rest to be made."""

    def __init__(self, cache: PeerCache) -> None:
        self._cache = cache
        self._logs = cache.root / "logs"
        self._failed: dict[str, str] = {}

    def run(self, peers: Sequence[str], models: Sequence[str]) -> int:
        self._logs.mkdir(parents=True, exist_ok=True)
        for peer in peers:
            self._step(f"environment {peer}", self._cache.environment(peer), lambda peer=peer: self._install(peer))  # type: ignore[misc]
        for model in models:
            self._make_model(model, [peer for peer in peers if peer != "llama-cpp"])
        for name, reason in self._failed.items():
            print(f"NOT MADE  {name}: {reason}", file=sys.stderr)
        return 1 if self._failed else 0

    def _step(self, name: str, result: Path, make: Callable[[], None]) -> bool:
        """Make `result` unless a `make` of an earlier run ended well; whether it is there."""
        stamp = self._logs / f"{name.replace(' ', '-').replace('/', '-')}.done"
        if stamp.exists() and result.exists():
            print(f"present   {name}: {result}", flush=True)
            return True
        print(f"making    {name} ...", flush=True)
        started = time.monotonic()
        try:
            make()
        except (StepFailed, OSError, shutil.ReadError) as error:
            self._failed[name] = str(error)
            print(f"FAILED    {name}: {error}", flush=True)
            return False
        stamp.touch()
        print(f"made      {name}: {result}, {_size(result)}, {time.monotonic() - started:.0f} s", flush=True)
        return True

    def _run(self, log: str, *command: str | Path, env: dict[str, str] | None = None) -> None:
        """Run a command with its output in logs/LOG.log. StepFailed with the last line of it."""
        path = self._logs / f"{log}.log"
        with path.open("a") as output:
            print("+", *command, file=output, flush=True)
            try:
                done = subprocess.run(
                    list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env={**os.environ, **(env or {})}, check=False,
                )  # fmt: skip
            except OSError as error:
                raise StepFailed(f"{command[0]} cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            lines = path.read_text(errors="replace").strip().splitlines()
            raise StepFailed(f"{Path(command[0]).name} ended with {done.returncode}: {lines[-1][:300]} (log: {path})")

    # --- environments -------------------------------------------------------------------------------------------------
    def _install(self, name: str) -> None:
        python = self._cache.python(name)
        if not python.exists():
            self._run(name, sys.executable, "-m", "venv", self._cache.environment(name))
        self._run(name, python, "-m", "pip", "install", "-q", *_REQUIREMENTS[name])
        if name == "llama-cpp":
            self._build_llama_cpp(python)
        if name == "export":  # pip brings a build of it that does not match torch's
            self._run(name, python, "-m", "pip", "uninstall", "-q", "-y", "torchvision")

    def _build_llama_cpp(self, python: Path) -> None:
        """One native build serves llama-server, llama-bench and the Python package."""
        if shutil.which("cmake") is None:
            raise StepFailed("cmake is not installed, and llama.cpp is built with it")
        source = self._llama_cpp_source(python)

        def run(command: Command) -> None:
            self._run("llama-cpp", *command)

        libraries = llama_cpp_build.build(source, self._cache.llama_cpp / "build", run, tools=True)
        llama_cpp_build.install_package(python, source, libraries)
        run([python, "-c", "import llama_cpp; llama_cpp.llama_backend_init()"])

    def _llama_cpp_source(self, python: Path) -> Path:
        version = llama_cpp_build.VERSION
        source = self._cache.llama_cpp / f"llama_cpp_python-{version}"
        if not source.exists():
            downloads = self._cache.root / "downloads"
            pip: Command = [python, "-m", "pip", "download", "-q", "--no-deps", "-d", downloads]
            self._run("llama-cpp", *pip, "--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}")
            partial = source.with_name("unpacking")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.unpack_archive(downloads / f"{source.name}.tar.gz", partial)
            (partial / source.name).rename(source)
        return source

    # --- models -------------------------------------------------------------------------------------------------------
    def _make_model(self, model: str, exporting: Sequence[str]) -> None:
        paths = self._cache.gguf(model)
        made = [self._step(f"model {path.stem}", path, lambda p=path: self._make_gguf(model, p)) for path in paths]  # type: ignore[misc]
        if not exporting or not made[-1]:
            return
        checkpoint = self._cache.checkpoint(model)
        if not self._step(f"checkpoint {model}", checkpoint, lambda: self._make_checkpoint(paths[-1], checkpoint)):
            return
        for peer in exporting:
            export = self._cache.export(peer, model)
            self._step(f"export {peer} {model}", export, lambda p=peer, e=export: self._export(p, checkpoint, e))  # type: ignore[misc]

    def _make_gguf(self, model: str, path: Path) -> None:
        if path.is_file():
            return
        if MODELS[model].fetched:
            fetch: Command = [_ROOT / "tests" / "tools" / "fetch_models.py", "--dir", fetched_models(), model]
            self._run(f"model-{model}", sys.executable, *fetch)
            return
        mix = path.stem.rpartition("-random-")[2]
        program: Command = [
            Path(__file__).with_name("random_gguf.py"),
            "--shape",
            model,
            "--format",
            mix,
            "--out",
            path,
        ]
        self._run(f"model-{model}", self._converter(), *program)

    def _converter(self) -> Path:
        """An interpreter with torch, transformers and gguf: the tests' oracle environment where there is one."""
        if (oracle := oracle_python()).exists():
            return oracle
        name, environment = "environment convert", self._cache.environment("convert")
        if not self._step(name, environment, lambda: self._install("convert")):
            raise StepFailed(self._failed[name])
        return self._cache.python("convert")

    def _make_checkpoint(self, gguf: Path, folder: Path) -> None:
        """The GGUF file's weights as bfloat16, so that every peer quantises the same values."""
        code = (
            "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from fetch_models import to_hf;"
            "to_hf(Path(sys.argv[2]), Path(sys.argv[3]))"
        )
        tools = _ROOT / "tests" / "tools"
        self._run(f"checkpoint-{folder.name}", self._converter(), "-c", code, tools, gguf, folder)

    def _export(self, peer: str, checkpoint: Path, folder: Path) -> None:
        name, environment = "environment export", self._cache.environment("export")
        if not self._step(name, environment, lambda: self._install("export")):
            raise StepFailed(self._failed[name])
        python = self._cache.python("export")
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        log, offline = f"export-{peer}-{folder.name}", {"HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1"}
        if peer == "openvino":
            options: Command = ["--task", "text-generation-with-past", "--weight-format", "int4", "--group-size", "32"]
            command: Command = [python.with_name("optimum-cli"), "export", "openvino", "-m", checkpoint, *options]
            self._run(log, *command, "--ratio", "1.0", "--sym", partial, env=offline)
        else:
            command = [python, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", partial]
            options = ["-p", "int4", "-e", "cpu", "-c", self._cache.root / "models" / "builder-cache"]
            options += ["--extra_options", "int4_accuracy_level=4", "int4_block_size=32"]
            self._run(log, *command, *options, env=offline)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
