"""Inverse frequencies of rotary embeddings and their scalings, from config.json and from GGUF metadata."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.hf_config import ConfigReader
from ..errors import UnsupportedError

MAX_THETA: Final = 1e12


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeParameters:
    rope_theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None

    def inv_freq(self, head_dim: int) -> NDArray[np.float32]:
        """[head_dim / 2] float32, computed in float32 as transformers does."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        inv_freq = (np.float32(1.0) / np.float32(self.rope_theta) ** exponents).astype(np.float32)
        if self.llama3 is not None:
            inv_freq = _llama3(inv_freq, self.llama3)
        return (inv_freq / np.float32(self.linear_factor)).astype(np.float32)


def _llama3(inv_freq: NDArray[np.float32], scaling: Llama3Scaling) -> NDArray[np.float32]:
    wavelength = 2 * math.pi / inv_freq.astype(np.float64)
    turns = scaling.original_max_position_embeddings / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    # equal factors leave no band to blend over: the step lies at the shared factor
    smooth = np.clip((turns - scaling.low_freq_factor) / span, 0, 1) if span else (turns > scaling.low_freq_factor)
    return ((1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq).astype(np.float32)


def _scaling(reader: ConfigReader, theta: float, max_positions: int) -> RopeParameters:
    """Read a rope_scaling or rope_parameters object; refuse the types that we do not compute."""
    type_key = "rope_type" if reader.has("rope_type") else "type"
    kind = reader.choice(type_key, ("default", "linear", "llama3"), "default")
    reader.must_equal("type", kind)
    reader.must_equal("partial_rotary_factor", 1, 1.0)
    parameters = RopeParameters(theta)
    if kind == "linear":
        parameters = RopeParameters(theta, linear_factor=reader.number("factor", low=1e-3, high=1e6))
    if kind == "llama3":
        low = reader.number("low_freq_factor", low=1e-6, high=1e6)
        parameters = RopeParameters(
            theta,
            llama3=Llama3Scaling(
                reader.number("factor", low=1e-3, high=1e6),
                low,
                reader.number("high_freq_factor", low=low, high=1e6),
                reader.integer("original_max_position_embeddings", max_positions, high=1 << 31),
            ),
        )
    if kind == "default":
        reader.must_equal("factor", 1, 1.0)
    reader.raw("original_max_position_embeddings")  # also written beside types that do not use it
    if unread := reader.unread():
        raise UnsupportedError(f"{reader.where}: {unread[0]} is not known for the rope type {kind!r}")
    return parameters


def rope_from_config(reader: ConfigReader, default_theta: float) -> RopeParameters:
    """One rope for all layers: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    reader.must_equal("partial_rotary_factor", 1, 1.0)
    theta = reader.number("rope_theta", default_theta, low=1, high=MAX_THETA)
    max_positions = reader.integer("max_position_embeddings", 1, high=1 << 31)
    section = reader.section("rope_parameters")
    if section is not None:
        reader.must_equal("rope_scaling")
        theta = section.number("rope_theta", theta, low=1, high=MAX_THETA)
        return _scaling(section, theta, max_positions)
    section = reader.section("rope_scaling")
    return RopeParameters(theta) if section is None else _scaling(section, theta, max_positions)


def ropes_by_layer_type(
    reader: ConfigReader, theta: float, local_theta: float
) -> tuple[RopeParameters, RopeParameters]:
    """Gemma 3: (full_attention, sliding_attention) ropes."""
    theta = reader.number("rope_theta", theta, low=1, high=MAX_THETA)
    local_theta = reader.number("rope_local_base_freq", local_theta, low=1, high=MAX_THETA)
    max_positions = reader.integer("max_position_embeddings", 1, high=1 << 31)
    both = reader.section("rope_parameters")
    if both is None:
        scaling = reader.section("rope_scaling")
        full = RopeParameters(theta) if scaling is None else _scaling(scaling, theta, max_positions)
        return full, RopeParameters(local_theta)
    reader.must_equal("rope_scaling")
    result: list[RopeParameters] = []
    for name, base in (("full_attention", theta), ("sliding_attention", local_theta)):
        section = both.section(name)
        if section is not None:
            base = section.number("rope_theta", base, low=1, high=MAX_THETA)
        result.append(RopeParameters(base) if section is None else _scaling(section, base, max_positions))
    if unread := both.unread():
        raise UnsupportedError(f"{both.where}: {unread[0]} is unknown, expected full_attention and sliding_attention")
    return result[0], result[1]


def rope_from_gguf(reader: ConfigReader, default_theta: float) -> RopeParameters:
    """`ARCH.rope.*` keys. Llama 3 scaling is not among them: it comes as the tensor rope_freqs.weight."""
    theta = reader.number("rope.freq_base", default_theta, low=1, high=MAX_THETA)
    kind = reader.choice("rope.scaling.type", ("none", "linear"), "none")
    reader.must_equal("rope.scaling.attn_factor", 1.0)
    reader.raw("rope.scaling.original_context_length")  # a record of training, used by yarn only
    reader.raw("rope.scaling.finetuned")  # likewise
    if kind == "none":
        reader.must_equal("rope.scaling.factor", 1.0)
        reader.must_equal("rope.scale_linear", 1.0)
        return RopeParameters(theta)
    old_name: Any = reader.raw("rope.scale_linear")
    name = "rope.scale_linear" if old_name is not None else "rope.scaling.factor"
    return RopeParameters(theta, linear_factor=reader.number(name, low=1e-3, high=1e6))


def divide_by_factors(inv_freq: NDArray[np.float32], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Apply the tensor rope_freqs.weight [head_dim / 2]."""
    return (inv_freq / factors).astype(np.float32)
