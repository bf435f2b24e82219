"""Unquantised formats: f32, f16, bf16. A block is one element."""

from __future__ import annotations

import numpy as np

from .base import Bytes, Dequantizer, Floats


class F32(Dequantizer):
    name = "f32"

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        out[:] = np.ascontiguousarray(blocks).view(np.float32)


class F16(Dequantizer):
    name = "f16"

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        out[:] = np.ascontiguousarray(blocks).view(np.float16)


class BF16(Dequantizer):
    """The upper half of a float32."""

    name = "bf16"

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        bits = np.ascontiguousarray(blocks).view(np.uint16)
        np.left_shift(bits, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
