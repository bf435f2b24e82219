"""The processes of the engines that are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_cache import PEERS, default_cache

_SCRIPTS = Path(__file__).with_name("peers")
_ROOT = Path(__file__).resolve().parent.parent
PROBES = {  # engine -> the module that its environment must have
    "trivet": "trivet",
    "llama-cpp": "llama_cpp",
    "openvino": "openvino_genai",
    "onnxruntime-genai": "onnxruntime_genai",
}


class EngineError(Exception):
    """An engine that is not there, or that failed; the message names it."""


class Unsupported(Exception):
    """The engine cannot do this cell; the message is its reason."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine and the Python that has it."""

    name: str
    python: str

    @property
    def reads_gguf(self) -> bool:
        """The others load an export of their own."""
        return self.name in ("trivet", "llama-cpp")

    def check(self) -> None:
        """EngineError when the interpreter or its package is missing."""
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({PROBES[self.name]!r}) is None)"
        try:
            done = subprocess.run([self.python, "-c", code], env=environment_of(self.name), check=False)
        except OSError as error:
            raise EngineError(f"{self.name}: {self.python} cannot be run ({error.strerror})") from error
        if done.returncode != 0:
            raise EngineError(f"{self.name}: {self.python} has no package {PROBES[self.name]}; install it there")


def environment_of(name: str) -> dict[str, str]:
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    # An installed program has its modules compiled; here the first start, which does not count, does that.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if name == "trivet":
        paths = [str(_ROOT / "packaging" / "python"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    else:
        environment.pop("PYTHONPATH", None)
    return environment


class EngineProcess:
    """A running engine. `ask` sends one request of peers/protocol.py."""

    def __init__(self, spec: EngineSpec, *, log: Path) -> None:
        self.name = spec.name
        self._log = log
        script = _SCRIPTS / f"peer_{spec.name.replace('-', '_')}.py"
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [spec.python, str(script)], env=environment_of(spec.name), text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, operation: str, **request: Any) -> dict[str, Any]:
        """The answer. Unsupported, or EngineError when the engine failed or died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, **request}) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineError(f"{self.name} ended during {operation}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "unsupported" in answer:
            raise Unsupported(f"{self.name}: {answer['unsupported']}")
        if "error" in answer:
            raise EngineError(f"{self.name}: {operation} failed: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """End the process, by force if it does not go."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def parse_peer(text: str) -> EngineSpec:
    """NAME=PYTHON, or NAME for the environment that setup_peers.py made."""
    name, equals, python = text.partition("=")
    if equals and not python:
        raise EngineError(f"--peer {text!r}: expected NAME or NAME=PYTHON, such as llama-cpp=/envs/llama/bin/python")
    if name not in PEERS:
        raise EngineError(f"unknown peer {name!r}; known are {', '.join(PEERS)}")
    if equals:
        return EngineSpec(name, python)
    own = default_cache().python(name)
    if not own.exists():
        raise EngineError(f"--peer {name}: {own} does not exist; run `python bench/setup_peers.py --peer {name}` once")
    return EngineSpec(name, str(own))


def own_engine() -> EngineSpec:
    return EngineSpec("trivet", sys.executable)


@contextmanager
def running(
    specs: Sequence[EngineSpec], paths: Mapping[str, Path], *, threads: int, context: int
) -> Iterator[tuple[list[EngineProcess], dict[str, dict[str, Any]]]]:
    """The engines with their models loaded, and the answers to `load` by name; they end with the block.

    Trivet's answer has its `cost`, too.
    """
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as folder:
        engines: list[EngineProcess] = []
        loaded: dict[str, dict[str, Any]] = {}
        try:
            for spec in specs:
                engine = EngineProcess(spec, log=Path(folder) / f"{spec.name}.log")
                engines.append(engine)
                loaded[spec.name] = engine.ask("load", model=str(paths[spec.name]), threads=threads, context=context)
                if spec.name == "trivet":
                    loaded[spec.name]["cost"] = engine.ask("cost")
            yield engines, loaded
        finally:
            for engine in engines:
                engine.close()
