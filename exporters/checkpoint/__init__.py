"""Checkpoint files -> Checkpoint: config and lazy tensors, validated before any weight is read."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from .tensors import Checkpoint, MappedFile, TensorInfo

__all__ = ["Checkpoint", "MappedFile", "TensorInfo", "open_checkpoint", "weight_paths"]


def weight_paths(path: Path) -> list[Path]:
    """Real paths of the weight files of a checkpoint, in order; reads file names and the shard index only."""
    from . import gguf, safetensors

    if path.is_dir():
        return safetensors.shard_paths(path)
    if path.is_file():
        return gguf.shard_paths(path)
    raise CheckpointError(f"{path}: no such checkpoint; expected a .gguf file or a directory with config.json")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file (any part of a split one) or a safetensors directory.

    Raises CheckpointError on a damaged file, UnsupportedError on a type of weight that we do not run.
    """
    from . import gguf, safetensors

    if path.is_dir():
        return safetensors.open_safetensors(path)
    if path.is_file():
        return gguf.open_gguf(path)
    raise CheckpointError(f"{path}: no such checkpoint; expected a .gguf file or a directory with config.json")
