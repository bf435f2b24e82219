"""Package folders: content identity, reuse, atomic writing.

A cache entry is named after the model and a digest of everything that the package depends on: the place, size and
sampled bytes of the weight files, the small files beside them, the options, and this program's version.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..backends.contract.byte_pairs import BYTE_PAIRS_NAME
from ..backends.contract.manifest import (
    CHAT_TEMPLATE_NAME,
    GRAPH_NAME,
    MANIFEST_NAME,
    SCHEMA_VERSION,
    TOKENIZER_NAME,
    Manifest,
    Source,
    read_manifest,
    write_manifest,
)
from .errors import CheckpointError, PackageError

if TYPE_CHECKING:
    import onnx

EXPORTER_VERSION: Final = 4  # raise it when the same checkpoint would give another package
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
    from .. import __version__

    digest = hashlib.sha256()
    for part in (__version__, SCHEMA_VERSION, EXPORTER_VERSION, tokenizer_pre, source_dir):
        digest.update(f"{part}\0".encode())
    for source in sources:
        digest.update(f"{source.name}\0{source.digest}\0".encode())
    if checkpoint.is_dir():
        for name in CHECKPOINT_FILES:
            path = checkpoint / name
            digest.update(f"{name}\0{_file_digest(path) if path.is_file() else ''}\0".encode())
    return f"{readable_name(checkpoint)}-{digest.hexdigest()[:16]}"


def readable_name(checkpoint: Path) -> str:
    """The part of a cache entry's name that is not a digest."""
    stem = checkpoint.stem if checkpoint.is_file() else checkpoint.absolute().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:60] or "model"


def _file_digest(path: Path) -> str:
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


@contextlib.contextmanager
def one_export_at_a_time(source: Path, target: Path) -> Iterator[None]:
    """Processes that export the same weights take turns, so that the later ones find the package of the first.

    The lock is on the weight file itself: it leaves nothing behind. What a killed export left beside `target` is
    removed. Where the file system has no locks the exports run side by side, which costs only time.
    """
    try:
        file = source.open("rb")
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield
            return
        for stale in target.parent.glob(f".{glob.escape(target.name)}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


def file_table(package_dir: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of the files that the manifest vouches for."""
    return {
        name: {"size_bytes": (package_dir / name).stat().st_size, "sha256": _file_digest(package_dir / name)}
        for name in PACKAGE_FILES
        if (package_dir / name).is_file()
    }


def is_reusable(package_dir: Path, source_dir: Path, sources: list[Source], verify: bool) -> bool:
    """True if the folder is whole, undamaged and made from these very files; brings its mtimes up to date."""
    try:
        manifest = read_manifest(package_dir)
        if manifest.extra.get("files") != file_table(package_dir) or GRAPH_NAME not in manifest.extra["files"]:
            return False
    except (OSError, ValueError, msgspec.MsgspecError, CheckpointError):
        return False
    if Path(manifest.source_dir) != source_dir or (verify and not manifest.verification.performed):
        return False
    if [(s.name, s.size_bytes, s.digest) for s in manifest.sources] != [
        (s.name, s.size_bytes, s.digest) for s in sources
    ]:
        return False
    if manifest.sources != sources:  # touched or copied back, with the same bytes
        with contextlib.suppress(PackageError):  # in a read-only cache the entry stays as good as it was
            _replace_manifest(msgspec.structs.replace(manifest, sources=sources), package_dir)
    return True


def _replace_manifest(manifest: Manifest, package_dir: Path) -> None:
    with _os_errors(package_dir), tempfile.TemporaryDirectory(dir=package_dir, prefix=".new-") as temporary:
        write_manifest(manifest, Path(temporary))
        os.replace(Path(temporary) / MANIFEST_NAME, package_dir / MANIFEST_NAME)


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


@contextlib.contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise PackageError(
            f"cannot write the model package {path}: {reason}; free space there or choose a writable place "
            f"(--out, or the environment variable TRIVET_HOME)"
        ) from error


@contextlib.contextmanager
def new_package(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block ends without an error.

    An older folder of that name is replaced. If another process was faster, its folder is replaced or kept: both hold
    the same content, and neither is ever seen half written.
    """
    with _os_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        with _os_errors(target):
            yield temporary
            temporary.chmod(0o755)
            _move_into_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, target: Path) -> None:
    for _ in range(100):
        try:
            temporary.rename(target)
            return
        except OSError:
            if not target.exists():
                raise
        old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
        with contextlib.suppress(FileNotFoundError):  # another process moved it away
            target.rename(old / "package")
        shutil.rmtree(old, ignore_errors=True)
    raise PackageError(f"cannot write the model package {target}: other processes keep replacing it; try again")


def write_graph(model: onnx.ModelProto, package_dir: Path) -> None:
    (package_dir / GRAPH_NAME).write_bytes(model.SerializeToString())
