"""Where setup_peers.py puts environments and models, and what the models are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PEERS = ("llama-cpp", "onnxruntime-genai", "openvino")


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the comparison: one or more GGUF files, and one int4 export for each peer that reads no GGUF."""

    files: tuple[str, ...]  # GGUF file names; the last one is the most exact: exports are made of it
    megabytes: int  # of the GGUF files together
    fetched: bool = False  # a published model (tests/tools/fetch_models.py); else random weights of this shape


MODELS = {
    "smollm2-135m": Model(("smollm2-135m-instruct-q4_1.gguf",), 98, fetched=True),
    "gemma-3-270m": Model(("gemma-3-270m-q4_k_m.gguf",), 253, fetched=True),
    "qwen2.5-coder-0.5b": Model(("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",), 491, fetched=True),
    "qwen2.5-coder-1.5b": Model(("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",), 1117, fetched=True),
    "qwen3-0.6b": Model(tuple(f"qwen3-0.6b-random-{mix}.gguf" for mix in ("q4_0", "q4_k_m", "q8_0")), 1413),
    "llama3.2-1b": Model(tuple(f"llama3.2-1b-random-{mix}.gguf" for mix in ("q4_0", "q4_k_m", "q8_0")), 2885),
}


@dataclass(frozen=True, slots=True)
class PeerCache:
    """Paths below one folder. Nothing here makes anything."""

    root: Path

    def environment(self, name: str) -> Path:
        return self.root / "envs" / name

    def python(self, name: str) -> Path:
        return self.environment(name) / "bin" / "python"

    @property
    def llama_cpp(self) -> Path:
        """The source of llama-cpp-python, and below it the native build of its llama.cpp."""
        return self.root / "llama.cpp"

    @property
    def llama_cpp_tools(self) -> Path:
        """llama-server, llama-bench and llama-quantize."""
        return self.llama_cpp / "build" / "bin"

    def gguf(self, model: str) -> list[Path]:
        folder = fetched_models() if MODELS[model].fetched else self.root / "models" / "gguf"
        return [folder / name for name in MODELS[model].files]

    def checkpoint(self, model: str) -> Path:
        """The Hugging Face folder that exports are made of."""
        return self.root / "models" / "checkpoints" / model

    def export(self, peer: str, model: str) -> Path:
        return self.root / "models" / peer / model

    def peer_model(self, peer: str, stem: str) -> Path | None:
        """What `peer` loads in place of the GGUF file with this stem; None where there is nothing."""
        for name, model in MODELS.items():
            if f"{stem}.gguf" in model.files and (path := self.export(peer, name)).is_dir():
                return path
        return None


def default_cache() -> PeerCache:
    """$TRIVET_BENCH_CACHE, else trivet-bench in the user's cache folder."""
    return PeerCache(Path(os.environ.get("TRIVET_BENCH_CACHE") or _user_cache() / "trivet-bench"))


def fetched_models() -> Path:
    """The folder that the tests keep published models in."""
    return Path(os.environ.get("TRIVET_TEST_MODELS") or Path.home() / ".cache" / "trivet-tests" / "models")


def oracle_python() -> Path:
    """The interpreter of the tests' oracle environment, which has torch and transformers."""
    folder = os.environ.get("TRIVET_ORACLE_VENV") or _user_cache() / "trivet-tests" / "oracle-venv"
    return Path(folder) / "bin" / "python"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
