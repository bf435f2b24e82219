"""Unquantised formats: f32, f16, bf16. A block is one element."""

from __future__ import annotations

import numpy as np

from .base import Bytes, Floats, Quantizer


class F32(Quantizer):
    name = "f32"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        return np.ascontiguousarray(values).view(np.uint8)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        out[:] = np.ascontiguousarray(blocks).view(np.float32)


class F16(Quantizer):
    name = "f16"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        return values.astype(np.float16).view(np.uint8)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        out[:] = np.ascontiguousarray(blocks).view(np.float16)


class BF16(Quantizer):
    """The upper half of a float32, rounded to nearest even; NaNs stay NaNs and become quiet."""

    name = "bf16"

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
        quiet_nan = (bits >> 16) | np.uint32(64)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(is_nan, quiet_nan, rounded).astype(np.uint16).view(np.uint8)

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        bits = np.ascontiguousarray(blocks).view(np.uint16)
        np.left_shift(bits, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
