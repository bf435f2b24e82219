"""What a checkpoint is to the rest of the exporters: a config, and named tensors that stay in their files."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError


class MappedFile:
    """A read-only memory map of a checkpoint file. Pages are file backed: reading costs no anonymous memory."""

    def __init__(self, path: Path) -> None:
        """Map `path`; CheckpointError if it is no readable, non-empty regular file."""
        self.path = path  # real path, no symlinks
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                self.size = status.st_size
                self.mtime_ns = status.st_mtime_ns
                if self.size == 0:
                    raise CheckpointError(f"{path}: the file is empty (0 bytes)")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error

    def close(self) -> None:
        # A view of the map that is still alive keeps it open; it then closes with the last view.
        with contextlib.suppress(BufferError):
            self.map.close()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the checkpoint; its bytes are `file.map[offset : offset + nbytes]`."""

    name: str  # as in the checkpoint
    shape: tuple[int, ...]  # row-major, elements
    format: str  # a key of contract.formats.FORMATS, or the checkpoint's own name for a type that we do not run
    file: MappedFile
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint, validated against the sizes of its files. Close it when done."""

    kind: str  # "gguf" | "safetensors"
    path: Path  # as the user gave it
    directory: Path  # where tokenizer.json and the like lie (symlinks kept, so that a hub cache works)
    name: str  # human name of the model
    files: tuple[MappedFile, ...]  # all in one real directory
    tensors: Mapping[str, TensorInfo]
    metadata: dict[str, Any] = field(default_factory=dict)  # GGUF key-value pairs; empty for safetensors
    config: dict[str, Any] = field(default_factory=dict)  # config.json; empty for GGUF
    generation_config: dict[str, Any] = field(default_factory=dict)  # generation_config.json; empty for GGUF

    @property
    def source_dir(self) -> Path:
        """The real directory of the weight files."""
        return self.files[0].path.parent

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_one_directory(paths: list[Path]) -> None:
    """The graph finds its weights by file name in one directory; CheckpointError if they are spread."""
    directories = sorted({str(p.parent) for p in paths})
    if len(directories) > 1:
        raise CheckpointError(
            f"the weight files lie in {len(directories)} directories ({', '.join(directories)}); "
            f"expected one: put them (or hard links) into one directory"
        )
