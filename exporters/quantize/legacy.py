"""ggml's formats with blocks of 32: a float16 scale, for some a float16 minimum, and 4, 5 or 8 bits an element.

Low nibbles hold elements 0..15, high nibbles 16..31; the fifth bits are a little-endian 32-bit word, bit i for
element i.
"""

from __future__ import annotations

import numpy as np

from .base import Bytes, Floats, Quantizer, half, half_bytes, inverse


def _unpack_nibbles(packed: Bytes) -> Bytes:
    """[n, 16] -> [n, 32] values 0..15."""
    q = np.empty((len(packed), 32), np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=q[:, :16])
    np.right_shift(packed, np.uint8(4), out=q[:, 16:])
    return q


def _pack_nibbles(q: Bytes) -> Bytes:
    return (q[:, :16] & np.uint8(15)) | (q[:, 16:] << np.uint8(4))


def _unpack_fifth_bits(high: Bytes) -> Bytes:
    """[n, 4] -> [n, 32] values 0 or 16."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return np.left_shift(bits, np.uint8(4), out=bits)


def _pack_fifth_bits(q: Bytes) -> Bytes:
    return np.packbits(q >> np.uint8(4), axis=1, bitorder="little")


def _extreme(values: Floats) -> Floats:
    """The element of the largest magnitude of each block, with its sign [n, 1]; the first one of equals."""
    return np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)


def _symmetric(values: Floats, levels: int) -> tuple[Floats, Bytes]:
    """(scale, q): the extreme value maps to -levels, which is stored as 0."""
    scale = _extreme(values) / np.float32(-levels)
    q = np.trunc(values * inverse(scale) + np.float32(levels + 0.5))
    return scale, q.clip(0, 2 * levels - 1).astype(np.uint8)


def _affine(values: Floats, steps: int) -> tuple[Floats, Floats, Bytes]:
    """(scale, minimum, q): the range of each block in `steps` steps."""
    low = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - low) / np.float32(steps)
    q = np.trunc((values - low) * inverse(scale) + np.float32(0.5))
    return scale, low, q.clip(0, steps).astype(np.uint8)


def _round_half_away(values: Floats) -> Floats:
    magnitude = np.abs(values)
    floor = np.floor(magnitude)
    rounded: Floats = np.sign(values) * (floor + np.floor(2 * (magnitude - floor)))
    return rounded


class Q4_0(Quantizer):
    """d * (q - 8)."""

    name = "q4_0"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        scale, q = _symmetric(values, 8)
        return np.concatenate([half_bytes(scale), _pack_nibbles(q)], axis=1)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        q = _unpack_nibbles(blocks[:, 2:])
        np.subtract(q, np.uint8(8), out=q)  # wraps to the two's complement
        out[:] = q.view(np.int8)
        np.multiply(out, half(blocks, 0), out=out)


class Q4_1(Quantizer):
    """d * q + m."""

    name = "q4_1"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        scale, low, q = _affine(values, 15)
        return np.concatenate([half_bytes(scale), half_bytes(low), _pack_nibbles(q)], axis=1)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        out[:] = _unpack_nibbles(blocks[:, 4:])
        np.multiply(out, half(blocks, 0), out=out)
        np.add(out, half(blocks, 2), out=out)


class Q5_0(Quantizer):
    """d * (q - 16)."""

    name = "q5_0"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        scale, q = _symmetric(values, 16)
        return np.concatenate([half_bytes(scale), _pack_fifth_bits(q), _pack_nibbles(q)], axis=1)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        q = _unpack_nibbles(blocks[:, 6:])
        np.bitwise_or(q, _unpack_fifth_bits(blocks[:, 2:6]), out=q)
        np.subtract(q, np.uint8(16), out=q)
        out[:] = q.view(np.int8)
        np.multiply(out, half(blocks, 0), out=out)


class Q5_1(Quantizer):
    """d * q + m."""

    name = "q5_1"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        scale, low, q = _affine(values, 31)
        return np.concatenate([half_bytes(scale), half_bytes(low), _pack_fifth_bits(q), _pack_nibbles(q)], axis=1)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        q = _unpack_nibbles(blocks[:, 8:])
        np.bitwise_or(q, _unpack_fifth_bits(blocks[:, 4:8]), out=q)
        out[:] = q
        np.multiply(out, half(blocks, 0), out=out)
        np.add(out, half(blocks, 2), out=out)


class Q8_0(Quantizer):
    """d * q, q signed; rounded half away from zero."""

    name = "q8_0"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
        q = _round_half_away(values * inverse(scale)).astype(np.int8)
        return np.concatenate([half_bytes(scale), q.view(np.uint8)], axis=1)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        out[:] = blocks[:, 2:].view(np.int8)
        np.multiply(out, half(blocks, 0), out=out)
