"""ggml's K formats: super-blocks of 256 whose groups have scales of their own, held in 6 or 8 bits.

q4_k and q5_k: 8 groups of 32, value = (d * scale) * q - (dmin * minimum), scales and minima of 6 bits in 12 bytes.
q6_k: 16 groups of 16, value = (d * scale) * (q - 32), scales int8.
"""

from __future__ import annotations

import numpy as np

from .base import Bytes, Dequantizer, Floats, half


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


class Q4_K(Dequantizer):
    name = "q4_k"

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        _apply_groups(_unpack_nibble_pairs(blocks[:, 16:]), blocks, out)


class Q5_K(Dequantizer):
    """Bit g of byte i of the 32 high bytes is the fifth bit of element i of group g."""

    name = "q5_k"

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        q = _unpack_nibble_pairs(blocks[:, 48:])
        high = blocks[:, 16:48]
        for group in range(8):
            bits = (high >> np.uint8(group)) & np.uint8(1)
            np.bitwise_or(q[:, group], bits << np.uint8(4), out=q[:, group])
        _apply_groups(q, blocks, out)


class Q6_K(Dequantizer):
    """128 bytes of low nibbles, 64 of top bit pairs, 16 int8 scales, d; each half of the block packed on its own."""

    name = "q6_k"

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
