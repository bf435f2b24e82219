"""NumPy references of the matrix ops, and quantised test weights made of random valid blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from trivet.backends.contract.formats import FORMATS

Array = NDArray[Any]
FLOAT_FORMATS = ("f32", "f16", "bf16")
BLOCK_FORMATS = tuple(name for name, f in FORMATS.items() if f.block_size > 1)
HALVES = ("q6_k",)  # formats with a scale per 16 elements


def random_weight(fmt: str, rows: int, columns: int, rng: np.random.Generator) -> Array:
    """uint8 [rows, row_bytes]: every bit pattern of the integers, scales of ordinary size and either sign."""
    spec = FORMATS[fmt]
    if fmt == "f32":
        return rng.standard_normal((rows, columns), np.float32).view(np.uint8)
    if fmt == "f16":
        return rng.standard_normal((rows, columns), np.float32).astype(np.float16).view(np.uint8)
    if fmt == "bf16":
        high = rng.standard_normal((rows, columns), np.float32).view(np.uint32) >> 16
        return high.astype(np.uint16).view(np.uint8)
    blocks = rng.integers(0, 256, (rows, columns // spec.block_size, spec.block_bytes), np.uint8)
    for offset in HALF_OFFSETS[fmt]:
        scale = (rng.standard_normal(blocks.shape[:2]) * 0.02).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


HALF_OFFSETS = {  # where a block keeps float16 scales
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}


def _halves(blocks: Array, offset: int) -> Array:
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16).astype(np.float32)


def _nibbles(raw: Array) -> Array:
    """[..., n] bytes -> [..., 2 n]: all low nibbles, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1).astype(np.int32)


def _k_scales(raw: Array) -> tuple[Array, Array]:
    """The 12 bytes of a q4_k or q5_k block -> scales and minima, int32 [..., 8]."""
    low, high = raw[..., :4], raw[..., 4:8]
    rest = raw[..., 8:12]
    scale = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=-1)
    minimum = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=-1)
    return scale.astype(np.int32), minimum.astype(np.int32)


def split_blocks(fmt: str, weight: Array) -> tuple[Array, Array, Array]:
    """Signed integers [rows, blocks of 32, 32], scales [rows, blocks, 2] per half and added minima [rows, blocks]."""
    spec = FORMATS[fmt]
    rows = weight.shape[0]
    b = weight.reshape(rows, -1, spec.block_bytes)
    minimum: Array = np.zeros(b.shape[:2], np.float32)
    if fmt in ("q4_0", "q4_1", "q5_0", "q5_1"):
        has_min, five = fmt.endswith("_1"), fmt.startswith("q5")
        at = 4 if has_min else 2
        q = _nibbles(b[..., at + 4 * five :])
        if five:
            q |= np.unpackbits(b[..., at : at + 4], axis=-1, bitorder="little").astype(np.int32) << 4
        if has_min:
            minimum = _halves(b, 2)[..., 0]
        else:
            q -= 16 if five else 8
        scale = np.repeat(_halves(b, 0), 2, axis=-1)
        return q, scale, minimum
    if fmt == "q8_0":
        return b[..., 2:].view(np.int8).astype(np.int32), np.repeat(_halves(b, 0), 2, axis=-1), minimum
    if fmt in ("q4_k", "q5_k"):
        five = fmt == "q5_k"
        scale_int, minimum_int = _k_scales(b[..., 4:16])
        raw = b[..., 48 if five else 16 :].reshape(*b.shape[:2], 4, 32)
        q = np.stack([raw & 15, raw >> 4], axis=3).reshape(*b.shape[:2], 8, 32).astype(np.int32)
        if five:
            bits = np.unpackbits(b[..., 16:48, None], axis=-1, bitorder="little")  # [..., element, sub-block]
            q |= np.moveaxis(bits, -1, -2).astype(np.int32) << 4
        scale = _halves(b, 0) * scale_int.astype(np.float32)
        minimum = -(_halves(b, 2) * minimum_int.astype(np.float32))
        return q.reshape(rows, -1, 32), np.repeat(scale.reshape(rows, -1, 1), 2, axis=-1), minimum.reshape(rows, -1)
    assert fmt == "q6_k"
    low = b[..., :128].reshape(*b.shape[:2], 2, 2, 32)  # half of the block, run, element
    pairs = b[..., 128:192].reshape(*b.shape[:2], 2, 32)
    parts = [
        (low[..., run, :] >> (4 * upper) & 15) | ((pairs >> (2 * (2 * upper + run)) & 3) << 4)
        for upper in (0, 1)
        for run in (0, 1)
    ]
    q = np.stack(parts, axis=-2).astype(np.int32) - 32
    scale = _halves(b, 208) * b[..., 192:208].view(np.int8).astype(np.float32)
    return q.reshape(rows, -1, 32), scale.reshape(rows, -1, 2), np.zeros((rows, q[0].size // 32), np.float32)


def dequantize(fmt: str, weight: Array) -> Array:
    """float32 [rows, columns]."""
    if fmt == "f32":
        return weight.view(np.float32)
    if fmt == "f16":
        return weight.view(np.float16).astype(np.float32)
    if fmt == "bf16":
        return np.asarray((weight.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
    q, scale, minimum = split_blocks(fmt, weight)
    values = q.astype(np.float32) * np.repeat(scale, 16, axis=-1) + minimum[..., None]
    return np.asarray(values.reshape(weight.shape[0], -1))


def quantize_activations(x: Array) -> tuple[Array, Array]:
    """Integers [rows, blocks, 32] and scales [rows, blocks], as ARCHITECTURE.md states."""
    blocks = x.reshape(x.shape[0], x.shape[1] // 32, 32)
    amax = np.abs(blocks).max(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0))
    return np.rint(blocks * inverse[..., None]).astype(np.int32), amax / np.float32(127)


def matmul(x: Array, fmt: str, weight: Array, activation_dtype: str) -> tuple[Array, Array]:
    """x @ weight^T in float64, and the sum of the absolute values of its terms (what rounding errors scale with).

    Block formats with int8 activations use the integers that the kernels use, so only float32 rounding differs.
    """
    w = dequantize(fmt, weight).astype(np.float64)
    wide = x.astype(np.float64)
    if fmt in BLOCK_FORMATS and activation_dtype == "int8":
        q, d = quantize_activations(x)
        wide = (q * d[..., None].astype(np.float64)).reshape(x.shape)
    return wide @ w.T, np.abs(wide) @ np.abs(w).T


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """float32 a * b + c, rounded once."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    wide = c.astype(np.float64)
    total = product + wide
    # What the sum lost (Knuth's TwoSum). Where it lost something, its last bit is made 1 ("rounding to odd"), which
    # keeps the second rounding, to float32, from taking an inexact sum for the middle between two numbers.
    back = total - product
    lost = (product - (total - back)) + (wide - back)
    bits = total.view(np.int64)
    even = (lost != 0) & (bits % 2 == 0)
    away = (lost > 0) == (total > 0)
    return np.where(even, bits + np.where(away, 1, -1), bits).view(np.float64).astype(np.float32)


def rounded_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """float32 a * b + c, the product rounded, too."""
    return np.asarray(a * b + c)


def matmul_bits(x: Array, fmt: str, weight: Array, tier: str) -> Array:
    """The float32 sequence of ARCHITECTURE.md, operation by operation: what the tier must give, bit for bit."""
    multiply_add = rounded_multiply_add if tier == "baseline" else fused_multiply_add
    q, scale, minimum = split_blocks(fmt, weight)
    xq, d = quantize_activations(x)
    total = (d * xq.sum(axis=-1).astype(np.float32)).astype(np.float32)
    acc: Array = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    width = 16 if fmt in HALVES else 32
    for block in range(q.shape[1]):
        for part in range(32 // width):
            at = slice(part * width, (part + 1) * width)
            dot = (xq[:, None, block, at] * q[None, :, block, at]).sum(axis=-1)
            acc = multiply_add(scale[None, :, block, part] * d[:, block, None], dot.astype(np.float32), acc)
        if fmt.endswith("_1") or fmt in ("q4_k", "q5_k"):
            acc = multiply_add(minimum[None, :, block], total[:, block, None], acc)
    return acc


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


def gelu_tanh(x: Array) -> Array:
    """0.5 x (1 + tanh(u)), written so that nothing cancels where tanh is near -1."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def soft_cap(x: Array, cap: float) -> Array:
    return np.asarray(cap * np.tanh(x / cap)) if cap > 0 else x
