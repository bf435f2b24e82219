"""Look up a checkpoint's tensors under their Hugging Face names; every tensor must be used, every use must fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from ...backends.contract.formats import FORMATS
from ..checkpoint.tensors import Checkpoint, TensorInfo
from ..errors import CheckpointError, UnsupportedError

_LAYER: Final = re.compile(r"^model\.layers\.(\d+)\.(.+)$")


class TensorTable:
    """Hands out tensors by Hugging Face name and records what was asked for."""

    def __init__(self, checkpoint: Checkpoint, gguf_names: Mapping[str, str], ignorable: Sequence[str]) -> None:
        """`gguf_names`: Hugging Face name -> GGUF name, without layer prefixes; `ignorable`: regexes of full names."""
        self.checkpoint = checkpoint
        self.gguf_names = gguf_names
        self.ignorable = [re.compile(pattern) for pattern in ignorable]
        self.used: dict[str, TensorInfo] = {}  # by Hugging Face name: what the blocks name
        self.consumed: set[str] = set()  # own names of tensors that were read on the way and are no part of the model

    def own_name(self, name: str) -> str:
        """The checkpoint's own name of a tensor."""
        if self.checkpoint.kind != "gguf":
            return name
        if match := _LAYER.match(name):
            return f"blk.{match[1]}.{self.gguf_names[match[2]]}"
        return self.gguf_names[name]

    def __contains__(self, name: str) -> bool:
        return self.own_name(name) in self.checkpoint.tensors

    def take(self, name: str, *shape: int) -> str:
        """Check that the tensor exists with this shape and a format that we run; return its name.

        Raises CheckpointError if it is missing or has another shape, UnsupportedError on another format.
        """
        own = self.own_name(name)
        tensor = self.checkpoint.tensors.get(own)
        if tensor is None:
            raise CheckpointError(f"{self.checkpoint.path}: tensor {own!r} is missing, expected shape {list(shape)}")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {own!r} has the shape {list(tensor.shape)}, expected {list(shape)}"
            )
        self._check_format(tensor)
        self.used[name] = tensor
        return name

    def consume(self, name: str, *shape: int) -> TensorInfo:
        """Like `take`, for a tensor that the caller evaluates itself."""
        tensor = self.used.pop(self.take(name, *shape))
        self.consumed.add(tensor.name)
        return tensor

    def finish(self) -> None:
        """Refuse tensors that no block uses: they would be left out of the computation."""
        used = {tensor.name for tensor in self.used.values()} | self.consumed
        for name, tensor in self.checkpoint.tensors.items():
            if name in used or any(pattern.fullmatch(name) for pattern in self.ignorable):
                continue
            raise UnsupportedError(
                f"{self.checkpoint.path}: tensor {name!r} {list(tensor.shape)} has no place in this architecture; "
                f"the checkpoint holds something that would be left out"
            )

    def _check_format(self, tensor: TensorInfo) -> None:
        if tensor.format not in FORMATS:
            raise UnsupportedError(
                f"{self.checkpoint.path}: tensor {tensor.name!r} has the type {tensor.format}; supported are "
                f"{', '.join(f.upper() for f in FORMATS)}"
            )
