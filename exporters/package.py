"""What a package is made of, and whether that has changed. A start imports this; package_folder.py writes packages.

A cache entry is named after the model and a digest of everything that the package depends on: the place, size and
sampled bytes of the weight files, the small files beside them, the options, and this program's version.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from ..backends.contract.byte_pairs import BYTE_PAIRS_NAME
from ..backends.contract.manifest import (
    CHAT_TEMPLATE_NAME,
    GRAPH_NAME,
    SCHEMA_VERSION,
    TOKENIZER_NAME,
    Manifest,
    Source,
)
from .errors import CheckpointError, PackageError

EXPORTER_VERSION: Final = 6  # raise it when the same checkpoint would give another package
_HEAD_BYTES: Final = 16 << 20  # hashed whole: holds the header and tensor table of any sane checkpoint
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 << 10
# that the manifest vouches for
PACKAGE_FILES: Final = (GRAPH_NAME, TOKENIZER_NAME, CHAT_TEMPLATE_NAME, BYTE_PAIRS_NAME)
CHECKPOINT_FILES: Final = (  # of a checkpoint directory, hashed whole
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def source_of(path: Path) -> Source:
    """Identity of a weight file: size, time and a digest of its size, its first 16 MiB and 64 spread samples."""
    import hashlib  # a start that finds its package is faster without

    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest = hashlib.sha256(status.st_size.to_bytes(8, "little"))
            digest.update(file.read(_HEAD_BYTES))
            span = max(status.st_size - _SAMPLE_BYTES, 0)
            for index in range(_SAMPLES if status.st_size > _HEAD_BYTES else 0):
                file.seek(span * index // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return Source(name=path.name, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, digest=digest.hexdigest())


def entry_name(checkpoint: Path, source_dir: Path, sources: list[Source], tokenizer_pre: str | None) -> str:
    """Readable name and digest of the cache entry of a checkpoint."""
    import hashlib

    from .. import __version__

    digest = hashlib.sha256()
    for part in (__version__, SCHEMA_VERSION, EXPORTER_VERSION, tokenizer_pre, source_dir):
        digest.update(f"{part}\0".encode())
    for source in sources:
        digest.update(f"{source.name}\0{source.digest}\0".encode())
    if checkpoint.is_dir():
        for name in CHECKPOINT_FILES:
            path = checkpoint / name
            digest.update(f"{name}\0{file_digest(path) if path.is_file() else ''}\0".encode())
    return f"{readable_name(checkpoint)}-{digest.hexdigest()[:16]}"


def readable_name(checkpoint: Path) -> str:
    """The part of a cache entry's name that is not a digest."""
    stem = checkpoint.stem if checkpoint.is_file() else checkpoint.absolute().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:60] or "model"


def file_digest(path: Path) -> str:
    """sha256 of a whole file, hex."""
    import hashlib

    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def default_cache_dir() -> Path:
    """$TRIVET_HOME/packages, else the user's cache directory (XDG, which must be absolute) + trivet/packages."""
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if home := os.environ.get("TRIVET_HOME"):
            return Path(home).expanduser().absolute() / "packages"
        base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    except RuntimeError as error:
        raise PackageError("this user has no home folder to keep packages in; set TRIVET_HOME to a folder") from error
    return base / "trivet" / "packages"


def check_sources(manifest: Manifest) -> None:
    """Raise PackageError unless the weight files are where the package expects them, unchanged.

    The graph points into them: a file that changed would be read as garbage. One with another modification time is
    compared by digest, so a touched or restored file passes.
    """
    for source in manifest.sources:
        path = Path(manifest.source_dir) / source.name
        try:
            status = path.stat()
        except OSError as error:
            raise PackageError(
                f"{path}: the checkpoint file of this package cannot be read ({error.strerror}): put it back, or "
                "export the checkpoint where it is now with `trivet export`"
            ) from error
        if status.st_size == source.size_bytes and status.st_mtime_ns == source.mtime_ns:
            continue
        if status.st_size != source.size_bytes or source_of(path).digest != source.digest:
            raise PackageError(
                f"{path}: the checkpoint file has changed since the export ({source.size_bytes} bytes then, "
                f"{status.st_size} now, with other content): export it again with `trivet export`"
            )
