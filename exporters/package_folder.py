"""Package folders: reuse, atomic writing."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .._locks import lock_exclusively
from ..backends.contract.manifest import GRAPH_NAME, MANIFEST_NAME, Manifest, Source, read_manifest, write_manifest
from .errors import CheckpointError, PackageError
from .package import PACKAGE_FILES, file_digest

if TYPE_CHECKING:
    import onnx


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
            lock_exclusively(file, f"prepares {source}")
        except OSError:
            yield
            return
        for stale in target.parent.glob(f".{glob.escape(target.name)}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


def file_table(package_dir: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of the files that the manifest vouches for."""
    return {
        name: {"size_bytes": (package_dir / name).stat().st_size, "sha256": file_digest(package_dir / name)}
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
