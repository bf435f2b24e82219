"""Copying and hashing of large files in constant memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO

# A file that is written in such pieces lies in huge pages, where Linux has them for its file system.
_CHUNK_BYTES = 2 << 20


def copy_hashed(source: IO[bytes], target: Path) -> str:
    """Write a stream to a new file and return its sha256, hex."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """The sha256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
