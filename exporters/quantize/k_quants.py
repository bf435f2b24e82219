"""ggml's K formats: super-blocks of 256 whose groups have scales of their own, held in 6 or 8 bits.

q4_k and q5_k: 8 groups of 32, value = (d * scale) * q - (dmin * minimum), scales and minima of 6 bits in 12 bytes.
q6_k: 16 groups of 16, value = (d * scale) * (q - 32), scales int8. quantize_blocks fits each group to its range; it is
meant for tests and does no search as ggml's quantiser does.
"""

from __future__ import annotations

import numpy as np

from .base import Bytes, Floats, Quantizer, half, half_bytes, inverse


def _unpack_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """[n, 12] -> (scales, minima), each [n, 8] float32 of 0..63.

    Bytes 0-3: scales 0-3, bytes 4-7: minima 0-3 (6 bits each); bytes 8-11: low nibbles of scales and minima 4-7, whose
    top two bits are the top two bits of bytes 0-7.
    """
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales, minima = np.empty((len(packed), 8), np.float32), np.empty((len(packed), 8), np.float32)
    scales[:, :4] = low & np.uint8(63)
    minima[:, :4] = mid & np.uint8(63)
    scales[:, 4:] = (high & np.uint8(15)) | ((low >> np.uint8(2)) & np.uint8(48))
    minima[:, 4:] = (high >> np.uint8(4)) | ((mid >> np.uint8(2)) & np.uint8(48))
    return scales, minima


def _pack_scales(scales: Bytes, minima: Bytes) -> Bytes:
    top_scales, top_minima = (scales[:, 4:] >> np.uint8(4)), (minima[:, 4:] >> np.uint8(4))
    low = scales[:, :4] | (top_scales << np.uint8(6))
    mid = minima[:, :4] | (top_minima << np.uint8(6))
    high = (scales[:, 4:] & np.uint8(15)) | ((minima[:, 4:] & np.uint8(15)) << np.uint8(4))
    return np.concatenate([low, mid, high], axis=1)


def _round_to(values: Floats, top: int) -> Bytes:
    return np.rint(values).clip(0, top).astype(np.uint8)


def _affine_groups(values: Floats, steps: int) -> tuple[Bytes, Bytes, Bytes]:
    """(the 4 bytes d and dmin, the 12 packed bytes, q [n, 8, 32]) for values in `steps` steps."""
    groups = values.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)  # a minimum is subtracted and cannot be negative
    span = (groups.max(axis=2) - low).clip(0) / np.float32(steps)
    d = half_bytes(span.max(axis=1, keepdims=True) / np.float32(63))
    dmin = half_bytes(-low.min(axis=1, keepdims=True) / np.float32(63))
    header = np.concatenate([d, dmin], axis=1)
    d_stored, dmin_stored = half(header, 0), half(header, 2)
    scales = np.ceil(span * inverse(d_stored)).clip(0, 63).astype(np.uint8)
    minima = _round_to(-low * inverse(dmin_stored), 63)
    step = (d_stored * scales)[..., None]
    q = _round_to((groups + (dmin_stored * minima)[..., None]) * inverse(step), steps)
    return header, _pack_scales(scales, minima), q


def _apply_groups(q: Bytes, blocks: Bytes, out: Floats) -> None:
    """out = (d * scale) * q - (dmin * minimum) for q [n, 8, 32]."""
    scales, minima = _unpack_scales(blocks[:, 4:16])
    np.multiply(scales, half(blocks, 0), out=scales)
    np.multiply(minima, half(blocks, 2), out=minima)
    groups = out.reshape(-1, 8, 32)
    groups[:] = q
    np.multiply(groups, scales[..., None], out=groups)
    np.subtract(groups, minima[..., None], out=groups)


def _unpack_nibble_pairs(packed: Bytes) -> Bytes:
    """[n, 128] -> [n, 8, 32]: each run of 32 bytes holds two groups, low nibbles first."""
    runs = packed.reshape(-1, 4, 32)
    q = np.empty((len(packed), 4, 2, 32), np.uint8)
    np.bitwise_and(runs, np.uint8(15), out=q[:, :, 0])
    np.right_shift(runs, np.uint8(4), out=q[:, :, 1])
    return q.reshape(-1, 8, 32)


def _pack_nibble_pairs(q: Bytes) -> Bytes:
    pairs = q.reshape(-1, 4, 2, 32)
    return ((pairs[:, :, 0] & np.uint8(15)) | (pairs[:, :, 1] << np.uint8(4))).reshape(-1, 128)


class Q4_K(Quantizer):
    name = "q4_k"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        header, scales, q = _affine_groups(values, 15)
        return np.concatenate([header, scales, _pack_nibble_pairs(q)], axis=1)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        _apply_groups(_unpack_nibble_pairs(blocks[:, 16:]), blocks, out)


class Q5_K(Quantizer):
    """Bit g of byte i of the 32 high bytes is the fifth bit of element i of group g."""

    name = "q5_k"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        header, scales, q = _affine_groups(values, 31)
        high = np.packbits(q >> np.uint8(4), axis=1, bitorder="little").reshape(-1, 32)
        return np.concatenate([header, scales, high, _pack_nibble_pairs(q)], axis=1)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        q = _unpack_nibble_pairs(blocks[:, 48:])
        high = blocks[:, 16:48]
        for group in range(8):
            bits = (high >> np.uint8(group)) & np.uint8(1)
            np.bitwise_or(q[:, group], bits << np.uint8(4), out=q[:, group])
        _apply_groups(q, blocks, out)


class Q6_K(Quantizer):
    """128 bytes of low nibbles, 64 of top bit pairs, 16 int8 scales, d; each half of the block packed on its own."""

    name = "q6_k"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        groups = values.reshape(-1, 16, 16)
        span = np.abs(groups).max(axis=2) / np.float32(31)
        d = half_bytes(span.max(axis=1, keepdims=True) / np.float32(127))
        d_stored = d.view(np.float16).astype(np.float32)
        scales = np.ceil(span * inverse(d_stored)).clip(0, 127)
        q = np.rint(groups * inverse(d_stored * scales)[..., None]).clip(-32, 31).astype(np.int8).view(np.uint8)
        quarters = (q + np.uint8(32)).reshape(-1, 2, 4, 32)
        low = (quarters[:, :, :2] & np.uint8(15)) | (quarters[:, :, 2:] << np.uint8(4))
        top = quarters >> np.uint8(4)
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
        high = np.bitwise_or.reduce(top << shifts, axis=2)
        parts = [low.reshape(-1, 128), high.reshape(-1, 64), scales.astype(np.int8).view(np.uint8), d]
        return np.concatenate(parts, axis=1)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
        q = np.empty((len(blocks), 2, 4, 32), np.uint8)
        np.bitwise_and(low, np.uint8(15), out=q[:, :, :2].reshape(-1, 2, 64))
        np.right_shift(low, np.uint8(4), out=q[:, :, 2:].reshape(-1, 2, 64))
        for quarter in range(4):
            bits = (high >> np.uint8(2 * quarter)) & np.uint8(3)
            np.bitwise_or(q[:, :, quarter], bits << np.uint8(4), out=q[:, :, quarter])
        np.subtract(q, np.uint8(32), out=q)
        groups = out.reshape(-1, 16, 16)
        groups[:] = q.view(np.int8).reshape(-1, 16, 16)
        scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
        np.multiply(scales, half(blocks, 208), out=scales)
        np.multiply(groups, scales[..., None], out=groups)
