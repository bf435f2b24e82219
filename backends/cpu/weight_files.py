"""The checkpoint files that a session has mapped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ..errors import CheckpointChangedError, SessionCreateError


class WeightFiles:
    """Mapped weight files, held open to notice between steps when one gets another size.

    Reading what was cut off ends the process (SIGBUS), and a file that is copied over is read as garbage. A file that
    is replaced (renamed, as downloads and exports do) is another file: what is mapped stays as it was.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises SessionCreateError when one cannot be opened."""
        self._files: list[tuple[Path, int, int]] = []  # path, descriptor, bytes
        with ExitStack() as undo:
            undo.callback(self.close)
            for path in paths:
                try:
                    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                except OSError as error:
                    raise SessionCreateError(f"{path}: cannot be opened: {error.strerror}") from error
                self._files.append((path, descriptor, os.fstat(descriptor).st_size))
            undo.pop_all()

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
        while self._files:
            os.close(self._files.pop()[1])
