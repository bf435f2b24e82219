"""The checkpoint files that a session has mapped."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointChangedError, SessionCreateError
from ..library import map_cached_pages
from .external_data import ExternalTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class WeightFiles:
    """Weight files, mapped whole, and held open to notice between steps when one gets another size.

    Most tensors are too short for a huge page, whole files are not, and cores that stream weights through small pages
    wait for addresses, too. Linux gives huge pages to what it reads from disk for these maps, and to files that were
    written in pieces of that size.

    Reading what was cut off ends the process (SIGBUS), and a file that is copied over is read as garbage. A file that
    is replaced (renamed, as downloads and exports do) is another file: what is mapped stays as it was.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises SessionCreateError when one cannot be opened or mapped."""
        self._files: list[tuple[Path, int, int]] = []  # path, descriptor, bytes
        self._maps: dict[str, mmap.mmap] = {}  # by file name
        self._mapping: threading.Thread | None = None  # see map_ahead()
        self._stop_mapping = ctypes.c_int32(0)
        with ExitStack() as undo:
            undo.callback(self.close)
            for path in paths:
                try:
                    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                    self._files.append((path, descriptor, os.fstat(descriptor).st_size))
                    self._maps[path.name] = _map_file(descriptor)
                except (OSError, ValueError) as error:
                    reason = getattr(error, "strerror", None) or error
                    raise SessionCreateError(f"{path}: cannot be opened and mapped: {reason}") from error
            undo.pop_all()

    def array(self, tensor: ExternalTensor) -> NDArray[np.uint8]:
        """Its content, which lies in a map. SessionCreateError for a tensor that is not within one of the files."""
        import numpy as np

        weights, length = self._maps.get(tensor.location), math.prod(tensor.shape)
        if weights is None or tensor.offset + length > len(weights):
            raise SessionCreateError(
                f"weight {tensor.name!r}: bytes {tensor.offset} to {tensor.offset + length} of {tensor.location!r} "
                "are not in the checkpoint files of this package: export the checkpoint again"
            )
        return np.frombuffer(weights, np.uint8, length, tensor.offset).reshape(tensor.shape)

    def map_ahead(self, arrays: Sequence[NDArray[np.uint8]]) -> None:
        """Map what the page cache holds of results of array(), in this order, on a thread of its own. Called once.

        A first step that finds no page mapped waits for the system as long as it computes. Nothing happens when a file
        is somebody else's and may not be written to: Linux then says that all of it is cached.
        """
        if sys.platform != "linux" or not all(_is_writable(path, descriptor) for path, descriptor, _ in self._files):
            return
        arguments = arrays, self._stop_mapping  # which live as long as the thread
        thread = threading.Thread(target=map_cached_pages, args=arguments, name="trivet-map", daemon=True)
        thread.start()
        self._mapping = thread  # after start(), which may fail: one that never ran cannot be joined

    def check(self) -> None:
        """Raise CheckpointChangedError when a file is not as long as it was."""
        for path, descriptor, num_bytes in self._files:
            now = os.fstat(descriptor).st_size
            if now != num_bytes:
                raise CheckpointChangedError(
                    f"{path}: the checkpoint was written to while its weights are in use ({num_bytes} bytes when it "
                    f"was loaded, {now} now): load the model again, and replace such a file by renaming a new one"
                )

    def close(self) -> None:
        """Close the files. A map lives as long as a result of array()."""
        if self._mapping is not None:
            self._stop_mapping.value = 1
            self._mapping.join()
        self._maps.clear()
        while self._files:
            os.close(self._files.pop()[1])


def _is_writable(path: Path, descriptor: int) -> bool:
    """Whether this process may write to the file, or could give itself the right to."""
    return os.fstat(descriptor).st_uid == os.geteuid() or os.access(path, os.W_OK)


def _map_file(descriptor: int) -> mmap.mmap:
    """A read-only map of a whole file. Raises OSError, and ValueError for an empty file."""
    weights = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            weights.madvise(mmap.MADV_HUGEPAGE)
    return weights
