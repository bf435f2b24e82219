"""Generation defaults from generation_config.json, or from the `general.sampling.*` keys of a GGUF file."""

from __future__ import annotations

from typing import Final

from ..backends.contract.manifest import GenerationDefaults
from .checkpoint.hf_config import ConfigReader
from .checkpoint.tensors import Checkpoint

_GGUF_KEYS: Final = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def read_generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """Absent values stay None; ConfigError on a value that no sampler could use."""
    if checkpoint.kind == "gguf":
        reader, names = ConfigReader(checkpoint.metadata, str(checkpoint.path), "general.sampling."), _GGUF_KEYS
    else:
        reader = ConfigReader(checkpoint.generation_config, str(checkpoint.path / "generation_config.json"))
        names = {}

    def number(name: str, low: float, high: float) -> float | None:
        key = names.get(name, name)
        return reader.number(key, low=low, high=high) if reader.has(key) else None

    def integer(name: str, low: int, high: int) -> int | None:
        key = names.get(name, name)
        return reader.integer(key, low=low, high=high) if reader.has(key) else None

    top_k = integer("top_k", -1, 1 << 31)
    return GenerationDefaults(
        temperature=number("temperature", 0, 100),
        top_p=number("top_p", 1e-9, 1),
        top_k=top_k if top_k is None or top_k > 0 else 0,
        min_p=number("min_p", 0, 1),
        repetition_penalty=number("repetition_penalty", 1e-6, 100),
        max_new_tokens=integer("max_new_tokens", 1, 1 << 31),
    )
