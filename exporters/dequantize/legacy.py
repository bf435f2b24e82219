"""ggml's formats with blocks of 32: a float16 scale, for some a float16 minimum, and 4, 5 or 8 bits an element.

Low nibbles hold elements 0..15, high nibbles 16..31; the fifth bits are a little-endian 32-bit word, bit i for
element i.
"""

from __future__ import annotations

import numpy as np

from .base import Bytes, Dequantizer, Floats, half


def _unpack_nibbles(packed: Bytes) -> Bytes:
    """[n, 16] -> [n, 32] values 0..15."""
    q = np.empty((len(packed), 32), np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=q[:, :16])
    np.right_shift(packed, np.uint8(4), out=q[:, 16:])
    return q


def _unpack_fifth_bits(high: Bytes) -> Bytes:
    """[n, 4] -> [n, 32] values 0 or 16."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return np.left_shift(bits, np.uint8(4), out=bits)


class Q4_0(Dequantizer):
    """d * (q - 8)."""

    name = "q4_0"

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        q = _unpack_nibbles(blocks[:, 2:])
        np.subtract(q, np.uint8(8), out=q)  # wraps to the two's complement
        out[:] = q.view(np.int8)
        np.multiply(out, half(blocks, 0), out=out)


class Q4_1(Dequantizer):
    """d * q + m."""

    name = "q4_1"

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        out[:] = _unpack_nibbles(blocks[:, 4:])
        np.multiply(out, half(blocks, 0), out=out)
        np.add(out, half(blocks, 2), out=out)


class Q5_0(Dequantizer):
    """d * (q - 16)."""

    name = "q5_0"

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        q = _unpack_nibbles(blocks[:, 6:])
        np.bitwise_or(q, _unpack_fifth_bits(blocks[:, 2:6]), out=q)
        np.subtract(q, np.uint8(16), out=q)
        out[:] = q.view(np.int8)
        np.multiply(out, half(blocks, 0), out=out)


class Q5_1(Dequantizer):
    """d * q + m."""

    name = "q5_1"

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        q = _unpack_nibbles(blocks[:, 8:])
        np.bitwise_or(q, _unpack_fifth_bits(blocks[:, 4:8]), out=q)
        out[:] = q
        np.multiply(out, half(blocks, 0), out=out)
        np.add(out, half(blocks, 2), out=out)


class Q8_0(Dequantizer):
    """d * q, q signed."""

    name = "q8_0"

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        out[:] = blocks[:, 2:].view(np.int8)
        np.multiply(out, half(blocks, 0), out=out)
