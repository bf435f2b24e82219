"""What says, without reading a byte of the weights, that a cache entry is still good.

A stamp lies in its entry and holds the state (size, times, inode) of every file that the entry depends on and of the
entry's own files. Any write changes a file's ctime, so equal states mean equal content; anything else sends the caller
to the digests of package.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from ..backends.contract.manifest import MANIFEST_NAME, SCHEMA_VERSION, read_manifest
from .package import CHECKPOINT_FILES, EXPORTER_VERSION, PACKAGE_FILES, readable_name

STAMP_NAME: Final = "stamp.json"
_SETTLED_NS: Final = 2_000_000_000  # a file this old has a later time if it is written once more (FAT: steps of 2 s)


def find_stamped(cache_dir: Path, checkpoint: Path, *, verify: bool, tokenizer_pre: str | None) -> Path | None:
    """The entry in `cache_dir` whose stamp fits `checkpoint` as it is now; None = there is none."""
    question = _question(checkpoint, tokenizer_pre)
    for entry in _entries_of(cache_dir, checkpoint):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, msgspec.MsgspecError):
            stamp = json.loads((entry / STAMP_NAME).read_bytes())
            if stamp["question"] != question or (verify and not stamp["verified"]):
                continue
            manifest = read_manifest(entry)  # one that was changed has another state
            weights = [Path(manifest.source_dir, source.name) for source in manifest.sources]
            if stamp["files"] == _states(entry, checkpoint, weights):
                return entry
    return None


def _entries_of(cache_dir: Path, checkpoint: Path) -> list[Path]:
    try:
        names = os.listdir(cache_dir)
    except OSError:
        return []
    start = f"{readable_name(checkpoint)}-"
    return [cache_dir / name for name in names if name.startswith(start)]


def write_stamp(
    entry: Path, checkpoint: Path, weights: Iterable[Path], *, verified: bool, tokenizer_pre: str | None
) -> None:
    """Vouch for `entry`, whose content has just been compared. Not done where it cannot be written, or too early."""
    with contextlib.suppress(OSError):
        states = _states(entry, checkpoint, weights)
        newest = max(max(state[1:3]) for state in states.values() if state is not None)
        if time.time_ns() - newest < _SETTLED_NS:
            return
        stamp = {"question": _question(checkpoint, tokenizer_pre), "verified": verified, "files": states}
        temporary = entry / f".{STAMP_NAME}.{os.getpid()}"
        temporary.write_text(json.dumps(stamp))
        temporary.replace(entry / STAMP_NAME)


def _question(checkpoint: Path, tokenizer_pre: str | None) -> list[str | int | None]:
    from .. import __version__

    return [__version__, SCHEMA_VERSION, EXPORTER_VERSION, os.path.realpath(checkpoint), tokenizer_pre]


def _states(entry: Path, checkpoint: Path, weights: Iterable[Path]) -> dict[str, list[int] | None]:
    """State by path of every file that the entry depends on; a stamp with fewer of them vouches for nothing."""
    files = [*weights, *(entry / name for name in (MANIFEST_NAME, *PACKAGE_FILES))]
    if checkpoint.is_dir():  # its own state tells of files that come and go
        folder = checkpoint.absolute()
        files += [folder, *(folder / name for name in CHECKPOINT_FILES)]
    return {str(path): _state(str(path)) for path in files}


def _state(path: str) -> list[int] | None:
    """None: there is no such file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
