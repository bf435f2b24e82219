"""NumPy references of RotaryTable, RMSNorm, AddRMSNorm and PagedAttention, in float64, straight from the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from trivet.backends.contract.opset import KV_DTYPES, OPS

Array = NDArray[Any]


def rotary_table(positions: Array, inv_freq: Array, scale: float) -> Array:
    """float32 [T, 2 * len(inv_freq)]; the angle is rounded to float32, the functions are exact."""
    angles = (positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)[None, :]).astype(np.float64)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * scale


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """float64, over the last axis."""
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight)


def add_rms_norm(
    x: Array, residual: Array, weight: Array, post_weight: Array | None, eps: float, rows: Array | None = None
) -> tuple[Array, Array]:
    """(y, residual_out), float64, of `rows` of x and residual or of all."""
    if rows is not None:
        x, residual = x[rows], residual[rows]
    term = x.astype(np.float64) if post_weight is None else rms_norm(x, post_weight, eps)
    total = term + residual
    return rms_norm(total, weight, eps), total


def _e4m3_values() -> Array:
    """float32 [256]: what each byte of an fp8_e4m3 cache is."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, (bits & 7) / 8
    size = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))
    size[(bits & 0x7F) == 0x7F] = np.nan
    return np.where(bits < 128, size, -size).astype(np.float32)


E4M3_VALUES: Final = _e4m3_values()


def _to_e4m3(x: Array) -> Array:
    """Bytes; to the nearest, ties to even, and to +-448 beyond that."""
    finite = E4M3_VALUES[:0x7F].astype(np.float64)  # ascending
    size = np.minimum(np.abs(x.astype(np.float64)), finite[-1])
    low = np.searchsorted(finite, size, side="right") - 1
    high = np.minimum(low + 1, len(finite) - 1)
    below, above = size - finite[low], finite[high] - size
    bits = np.where((above < below) | ((above == below) & (low % 2 == 1)), high, low)
    bits = np.where(np.isnan(x), 0x7F, bits)
    return (bits | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def to_kv_dtype(x: Array, dtype: str) -> Array:
    """float32 values as stored: float32 and float16 arrays, bfloat16 and fp8_e4m3 as bit patterns; nearest even."""
    x = x.astype(np.float32)
    if dtype == "fp8_e4m3":
        return _to_e4m3(x)
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return x.astype(dtype)


def from_kv_dtype(x: Array, dtype: str) -> Array:
    """Inverse of to_kv_dtype, float32."""
    if dtype == "fp8_e4m3":
        return np.asarray(E4M3_VALUES[x])
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


STORED: Final = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "fp8_e4m3": np.uint8,
                 "int16_per_token_head": np.int16}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attributes of one PagedAttention node, and of the cache it works on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    kv_offset: int = 0
    rope_interleaved: int = 0
    sliding_window: int = 0
    soft_cap: float = 0.0
    norm_eps: float = 1e-6
    block_size: int = 16
    kv_dtype: str = "float32"
    elements_per_token: int = 0  # of all layers; 0 = just this one
    device: str = "cpu"  # whose KV layout

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
        elements = self.elements_per_token or self.kv_offset + 2 * self.num_kv_heads * self.head_dim
        return elements // self.head_dim * KV_DTYPES[self.kv_dtype].vector_bytes(self.head_dim)

    def attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPS["PagedAttention"].attributes}

    def _layer(self, kv_cache: Array) -> Array:
        """This layer in the cache's bytes: a view [num_blocks, bytes]."""
        before = self.kv_offset // self.head_dim * KV_DTYPES[self.kv_dtype].vector_bytes(self.head_dim)
        own = 2 * self.num_kv_heads * KV_DTYPES[self.kv_dtype].vector_bytes(self.head_dim)
        start, end = before * self.block_size, (before + own) * self.block_size
        if self.device == "cuda":
            return kv_cache[:, start:end]
        blocks = len(kv_cache)
        return kv_cache.reshape(-1)[start * blocks : end * blocks].reshape(blocks, -1)

    def _parts(self, kv_cache: Array) -> list[Array]:
        """Views of the layer's keys, values and, for int16_per_token_head, scales."""
        layer = self._layer(kv_cache).view(STORED[self.kv_dtype])
        blocks, heads, size, dim = len(layer), self.num_kv_heads, self.block_size, self.head_dim
        if self.device == "cuda":
            rows = layer.reshape(blocks, 2, heads, size, dim)
            return [rows[:, 0], rows[:, 1]]
        of_head = layer.reshape(blocks, heads, -1)
        keys, values, scales = np.split(of_head, [size * dim, 2 * size * dim], axis=2)
        if self.kv_dtype == "int16_per_token_head":
            return [
                keys.reshape(blocks, heads, dim // 2, size, 2),
                values.reshape(blocks, heads, size // 2, dim, 2),
                scales.view(np.float32).reshape(blocks, heads, 2, size),
            ]
        return [keys.reshape(blocks, heads, dim, size), values.reshape(blocks, heads, size, dim)]

    def slot(self, kv_cache: Array, block: int, offset: int) -> list[Array]:
        """Views of all that a token has in this layer: key and value [num_kv_heads, head_dim] (pairs of key elements
        apart for int16_per_token_head, which also has scales [num_kv_heads, 2])."""
        parts = self._parts(kv_cache)
        keys, values = parts[0][block], parts[1][block]
        if self.kv_dtype == "int16_per_token_head":
            return [keys[:, :, offset], values[:, offset // 2, :, offset % 2], parts[2][block, :, :, offset]]
        return [keys[:, offset] if self.device == "cuda" else keys[:, :, offset], values[:, offset]]

    def write(self, kv_cache: Array, slot: int, key: Array, value: Array) -> None:
        """key, value: [num_kv_heads, head_dim]."""
        views = self.slot(kv_cache, *divmod(slot, self.block_size))
        if self.kv_dtype == "int16_per_token_head":
            scales = np.stack([np.linalg.norm(key, axis=1), np.abs(value).max(axis=1)], axis=1) / 32767
            views[2][:] = scales
            key, value = (
                np.rint(row / np.where(scale > 0, scale, 1)[:, None])
                for row, scale in zip((key, value), scales.T, strict=True)
            )
            views[0][:], views[1][:] = key.reshape(len(key), -1, 2), value
            return
        for view, row in zip(views[:2], (key, value), strict=True):
            view[:] = to_kv_dtype(row, self.kv_dtype)

    def read(self, kv_cache: Array) -> Array:
        """float32 [2 (K, V), num_blocks, num_kv_heads, block_size, head_dim]."""
        keys, values, *scales = self._parts(kv_cache)
        if self.kv_dtype == "int16_per_token_head":
            shape = (*keys.shape[:2], self.block_size, self.head_dim)
            keys, values = keys.swapaxes(2, 3).reshape(shape), values.swapaxes(3, 4).reshape(shape)
            return np.stack([keys, values]) * scales[0].swapaxes(1, 2).swapaxes(0, 1)[..., None]
        if self.device == "cpu":
            keys = keys.swapaxes(2, 3)
        return from_kv_dtype(np.stack([keys, values]), self.kv_dtype)


def _rope(x: Array, cos_sin: Array, interleaved: int) -> Array:
    """x [T, heads, head_dim] float64, rotated over its first cos_sin.shape[1] elements."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half].astype(np.float64), cos_sin[:, None, half:].astype(np.float64)
    out = x.copy()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def paged_attention(shape: AttentionShape, inputs: dict[str, Array | None]) -> tuple[Array, Array]:
    """(out float64 [T, num_heads * head_dim], kv_cache_out) of the node's inputs by name."""
    given: dict[str, Array] = {k: v for k, v in inputs.items() if v is not None}
    s = shape
    tokens = len(given["qkv"])
    rows = given["qkv"].astype(np.float64).reshape(tokens, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
    q, k, v = np.split(rows, [s.num_heads, s.num_heads + s.num_kv_heads], axis=1)
    if "q_norm" in given:
        q = rms_norm(q, given["q_norm"], s.norm_eps)
    if "k_norm" in given:
        k = rms_norm(k, given["k_norm"], s.norm_eps)
    q, k = _rope(q, given["cos_sin"], s.rope_interleaved), _rope(k, given["cos_sin"], s.rope_interleaved)
    cache = given["kv_cache"].copy()
    for t, slot in enumerate(given["slot_mapping"]):
        if slot >= 0:
            s.write(cache, int(slot), k[t], v[t])
    stored = s.read(cache)
    out = np.zeros((tokens, s.num_heads, s.head_dim))
    starts = given["query_start_loc"]
    for r, seq_len in enumerate(given["seq_lens"]):
        blocks = given["block_table"][r, : -(-int(seq_len) // s.block_size)]
        kv = (
            stored[:, blocks]
            .astype(np.float64)
            .swapaxes(1, 2)
            .reshape(2, s.num_kv_heads, -1, s.head_dim)[:, :, :seq_len]
        )
        for t in range(starts[r], starts[r + 1]):
            out[t] = _attend_one(s, q[t], kv, int(given["positions"][t]), given.get("sinks"))
    return out.reshape(tokens, -1), cache


def _attend_one(s: AttentionShape, q: Array, kv: Array, position: int, sinks: Array | None) -> Array:
    """q [num_heads, head_dim], kv [2, num_kv_heads, seq_len, head_dim] -> [num_heads, head_dim]."""
    first = max(0, position - s.sliding_window + 1) if s.sliding_window else 0
    keys, values = np.repeat(kv[:, :, first : position + 1], s.num_heads // s.num_kv_heads, axis=1)
    scores = np.einsum("hd,hkd->hk", q, keys) * s.scale
    if s.soft_cap:
        scores = s.soft_cap * np.tanh(scores / s.soft_cap)
    top = scores.max(axis=1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - top)
    return np.asarray(np.einsum("hk,hkd->hd", weights / total, values))
