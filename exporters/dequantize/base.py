"""What a weight format is in NumPy. These classes are the oracle for all kernels."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...backends.contract.formats import FORMATS, WeightFormat

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Dequantizer:
    """One weight format."""

    name: ClassVar[str]  # key of FORMATS

    @classmethod
    def format(cls) -> WeightFormat:
        return FORMATS[cls.name]

    @staticmethod
    def dequantize_blocks(blocks: Bytes, out: Floats) -> None:
        """[n, block_bytes] uint8 -> `out` [n, block_size] float32, C-contiguous; every rounding as in ggml."""
        raise NotImplementedError


def half(blocks: Bytes, offset: int) -> Floats:
    """The float16 at byte `offset` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)
