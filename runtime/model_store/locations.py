"""Where trivet keeps files: `$TRIVET_HOME`, else `$XDG_CACHE_HOME/trivet`, else `~/.cache/trivet`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CacheError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def home() -> Path:
    """The root of all that trivet writes; it need not exist yet. CacheError when the user has no home."""
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen := os.environ.get("TRIVET_HOME"):
            return Path(chosen).expanduser().absolute()
        # The XDG specification says that a relative value counts as unset.
        base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    except RuntimeError as error:
        raise CacheError("this user has no home folder to keep models in; set TRIVET_HOME to a folder") from error
    return base / "trivet"


def models_dir() -> Path:
    """Pulled models, one folder each."""
    return home() / "models"


def packages_dir() -> Path:
    """Model packages that exports of checkpoints left."""
    return home() / "packages"


@contextmanager
def cache_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about a full, read-only or unusable folder into a CacheError that names `path`."""
    try:
        yield
    except OSError as error:
        if (mapped := as_cache_error(error, path)) is None:
            raise
        raise mapped from error


def as_cache_error(error: OSError, path: Path) -> CacheError | None:
    """The CacheError for an OSError met while writing under `path`; None when it is about something else."""
    if error.errno in _FULL:
        return CacheError(f"no space left on the disk of {path}; free some, or set TRIVET_HOME to another disk")
    if error.errno in _READ_ONLY:
        return CacheError(f"cannot write to {path} ({error.strerror}); set TRIVET_HOME to a folder you can write to")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return CacheError(f"{path} is not a folder; set TRIVET_HOME to a folder you can write to")
    return None


def make_dir(path: Path) -> Path:
    """Create a cache folder (and its parents); CacheError when that is impossible."""
    with cache_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path
