"""The packages that exports left in the cache: what each is of, and whether a load can still find it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..backends.contract.manifest import MANIFEST_NAME, Manifest, read_manifest
from .errors import PackageError
from .package import check_sources


@dataclass(frozen=True, slots=True)
class CachedPackage:
    directory: Path
    size_bytes: int  # of the package; the weights are not in it
    checkpoint: str  # the file or folder it was made of; "" = unknown
    problem: str  # why no load uses it any more; "" = it is good


def cached_packages(cache_dir: Path) -> list[CachedPackage]:
    """All entries of a cache, by name. Folders without a manifest are no packages of ours, or are being written."""
    return [_describe(path.parent) for path in sorted(cache_dir.glob(f"[!.]*/{MANIFEST_NAME}"))]


def remove_package(package: CachedPackage) -> None:
    """Delete an entry of the cache; PackageError when that fails."""
    try:
        shutil.rmtree(package.directory)
    except OSError as error:
        raise PackageError(f"{package.directory} cannot be removed: {error.strerror or error}") from error


def _describe(directory: Path) -> CachedPackage:
    size_bytes = sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())
    try:
        manifest = read_manifest(directory)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        return CachedPackage(directory, size_bytes, "", f"this trivet cannot read it ({error})")
    return CachedPackage(directory, size_bytes, _checkpoint_of(manifest), _problem_of(manifest))


def _checkpoint_of(manifest: Manifest) -> str:
    source_dir, names = Path(manifest.source_dir), [source.name for source in manifest.sources]
    return str(source_dir / names[0] if names and names[0].endswith(".gguf") else source_dir)


def _problem_of(manifest: Manifest) -> str:
    from .. import __version__

    if manifest.trivet_version != __version__:
        return f"made by trivet {manifest.trivet_version}"
    try:
        check_sources(manifest)
    except PackageError as error:
        gone = isinstance(error.__cause__, OSError)
        return "its checkpoint is gone" if gone else "its checkpoint has changed"
    return ""
