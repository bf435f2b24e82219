"""What a weight format can do in NumPy. These classes are the oracle for all kernels."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...backends.contract.formats import FORMATS, WeightFormat

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Quantizer:
    """One weight format. Both methods work on whole blocks and keep nothing."""

    name: ClassVar[str]  # key of FORMATS

    @classmethod
    def format(cls) -> WeightFormat:
        return FORMATS[cls.name]

    @staticmethod
    def quantize_blocks(values: Floats) -> Bytes:
        """[n, block_size] finite float32 -> [n, block_bytes] uint8."""
        raise NotImplementedError

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        """[n, block_bytes] uint8 -> `out` [n, block_size] float32, C-contiguous; every rounding as in ggml."""
        raise NotImplementedError


def half(blocks: Bytes, offset: int) -> Floats:
    """The float16 at byte `offset` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def half_bytes(values: Floats) -> Bytes:
    """[n, 1] float32 -> the bytes of their float16 [n, 2]."""
    return values.astype(np.float16).view(np.uint8)


def inverse(scale: Floats) -> Floats:
    """1 / scale, 0 where scale is 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
