"""Weight formats in NumPy: dequantise, and read tensors of a checkpoint."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..checkpoint.tensors import TensorInfo
from .base import Bytes, Dequantizer, Floats
from .floats import BF16, F16, F32
from .k_quants import Q4_K, Q5_K, Q6_K
from .legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

DEQUANTIZERS: Final[dict[str, type[Dequantizer]]] = {
    q.name: q for q in (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)
}
_CHUNK_ELEMENTS: Final = 1 << 17  # temporaries of this many elements stay in the cache


def dequantize_rows(name: str, rows: Bytes, out: Floats | None = None) -> Floats:
    """[rows, row_bytes] uint8 -> [rows, n] float32, into `out` (C-contiguous) if given."""
    dequantizer = DEQUANTIZERS[name]
    weight_format = dequantizer.format()
    blocks = rows.reshape(-1, weight_format.block_bytes)
    if out is None:
        out = np.empty((len(rows), rows.shape[1] // weight_format.block_bytes * weight_format.block_size), np.float32)
    values = out.reshape(-1, weight_format.block_size)
    step = _CHUNK_ELEMENTS // weight_format.block_size
    for start in range(0, len(blocks), step):
        dequantizer.dequantize_blocks(blocks[start : start + step], values[start : start + step])
    return out


def raw_rows(tensor: TensorInfo) -> Bytes:
    """The bytes of a tensor [rows, row_bytes], a view of the mapped file; a vector is one row."""
    raw = np.frombuffer(tensor.file.map, np.uint8, tensor.nbytes, tensor.offset)
    num_rows = tensor.num_elements // tensor.shape[-1] if tensor.num_elements else 0
    return raw.reshape(num_rows, -1 if num_rows else 0)


def read_tensor(tensor: TensorInfo) -> Floats:
    """A small tensor as float32 in its shape."""
    return dequantize_rows(tensor.format, raw_rows(tensor)).reshape(tensor.shape)
