"""Weight formats: how the rows of a weight matrix lie in a checkpoint file.

Facts from the GGUF specification (ggml type ids, block sizes) and the safetensors dtype names.
"""

from __future__ import annotations

import msgspec


class WeightFormat(msgspec.Struct, frozen=True):
    """One weight format. A row of `n` elements takes `n // block_size * block_bytes` bytes."""

    name: str  # lower case, the value of the `formats` attribute of an op
    ggml_type: int  # type id in a GGUF tensor table
    block_size: int  # elements per block
    block_bytes: int  # bytes per block
    safetensors_dtype: str | None = None  # dtype name in a safetensors header, if it has one

    def row_bytes(self, num_elements: int) -> int:
        """Bytes of a row of `num_elements`; ValueError if a row does not hold whole blocks."""
        if num_elements % self.block_size:
            raise ValueError(
                f"{self.name}: a row of {num_elements} elements is not a multiple of the block size {self.block_size}"
            )
        return num_elements // self.block_size * self.block_bytes


FORMATS: dict[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat("f32", 0, 1, 4, "F32"),
        WeightFormat("f16", 1, 1, 2, "F16"),
        WeightFormat("q4_0", 2, 32, 18),
        WeightFormat("q4_1", 3, 32, 20),
        WeightFormat("q5_0", 6, 32, 22),
        WeightFormat("q5_1", 7, 32, 24),
        WeightFormat("q8_0", 8, 32, 34),
        WeightFormat("q4_k", 12, 256, 144),
        WeightFormat("q5_k", 13, 256, 176),
        WeightFormat("q6_k", 14, 256, 210),
        WeightFormat("bf16", 30, 1, 2, "BF16"),
    )
}
