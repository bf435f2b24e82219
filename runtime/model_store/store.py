"""Pulled models on disk: one folder each under `models/`, whole or absent, with a record of where it came from."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ..._locks import lock_exclusively
from . import locations
from .errors import CacheError, ModelStoreError

RECORD_NAME = "trivet-model.json"
_INCOMING = ".incoming"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # relative to the model's folder
    size_bytes: int
    sha256: str | None  # hex; None = the source gave none to compare with


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`trivet-model.json`."""

    name: str  # what the user can type
    reference: str  # what was pulled, as the user would pin it
    revision: str  # version of the package, or commit of the repository
    entry: str  # what to load: a file name (the first part of a split file), or "" for the folder itself
    files: list[StoredFile]
    license: str | None
    pulled_at: str  # UTC, ISO 8601


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the store."""

    directory: Path
    record: Record

    @property
    def path(self) -> Path:
        """What to load."""
        return self.directory / self.record.entry if self.record.entry else self.directory

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.record.files)

    def check(self) -> None:
        """Raise ModelStoreError when a file is missing or has another size than when it was pulled."""
        for file in self.record.files:
            path = self.directory / file.name
            size = path.stat().st_size if path.is_file() else None
            if size != file.size_bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise ModelStoreError(
                    f"{path} {found}, expected {file.size_bytes} bytes; "
                    f"run `trivet pull --force {self.record.reference}`"
                )


def slug(reference: str) -> str:
    """The folder name of a reference, one for each: neither `@` nor `+` occurs where `:` and `/` do."""
    return reference.translate({ord(":"): "@", ord("/"): "+"})


def find(reference: str) -> StoredModel | None:
    """The stored model of an exact reference."""
    directory = locations.models_dir() / slug(reference)
    return _read(directory) if (directory / RECORD_NAME).is_file() else None


def list_models() -> list[StoredModel]:
    """All whole models, by name. Folders without a record are not models; see `broken_folders`."""
    return sorted(
        (_read(record.parent) for record in _folders() if record.is_file()), key=lambda model: model.record.name
    )


def broken_folders() -> list[Path]:
    """Folders of the store that hold no record: nothing of ours left them."""
    return [record.parent for record in _folders() if not record.is_file()]


def remove(model: StoredModel) -> None:
    """Delete a model: first out of sight, then from the disk, so that a half deleted one is never found.

    The packages that were exported from it go too: without its weights they are of no use.
    """
    import shutil  # with its compressors: a start is faster without

    with locations.cache_errors(model.directory):
        for package in _packages_of(model.directory):
            shutil.rmtree(package)
        incoming = locations.make_dir(locations.models_dir() / _INCOMING)
        grave = incoming / f"{model.directory.name}.removed-{os.getpid()}"
        model.directory.rename(grave)
        shutil.rmtree(grave)


@contextmanager
def staging(reference: str) -> Iterator[Path]:
    """Lock a reference and yield the folder its files are gathered in; it may hold files of an interrupted pull.

    Two processes that pull the same reference take turns. The folder stays when the body fails: the caller removes
    it unless what lies there can be resumed.
    """
    incoming = locations.make_dir(locations.models_dir() / _INCOMING)
    with locations.cache_errors(incoming):
        lock = (incoming / f"{slug(reference)}.lock").open("w")
        with lock:
            lock_exclusively(lock, f"fetches {reference}")
            folder = incoming / slug(reference)
            folder.mkdir(exist_ok=True)
            yield folder


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise CacheError when the disk of `folder` has not the room; says how much is needed and free."""
    import shutil

    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CacheError(
            f"no space left on the disk of {locations.models_dir()}: {needed_bytes / 1e6:.0f} MB are needed and "
            f"{free_bytes / 1e6:.0f} MB free; free some, or set TRIVET_HOME to another disk"
        )


def install(folder: Path, record: Record) -> StoredModel:
    """Make a staged folder a model of the store, in one rename; an older model of the same reference goes."""
    target = locations.models_dir() / slug(record.reference)
    with locations.cache_errors(target):
        (folder / RECORD_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
        if target.exists():
            remove(StoredModel(directory=target, record=record))
        folder.rename(target)
    return StoredModel(directory=target, record=record)


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _packages_of(directory: Path) -> list[Path]:
    """Packages of the cache whose weights lie in a folder. What cannot be read as a package is left alone."""
    from ...backends.contract.manifest import MANIFEST_NAME, read_manifest

    found = []
    for manifest_path in locations.packages_dir().glob(f"*/{MANIFEST_NAME}"):
        try:
            manifest = read_manifest(manifest_path.parent)
        except (OSError, ValueError, msgspec.MsgspecError):
            continue
        if Path(manifest.source_dir) == directory.resolve():
            found.append(manifest_path.parent)
    return found


def _folders() -> list[Path]:
    root = locations.models_dir()
    if not root.is_dir():
        return []
    return [folder / RECORD_NAME for folder in root.iterdir() if folder.is_dir() and folder.name != _INCOMING]


def _read(directory: Path) -> StoredModel:
    path = directory / RECORD_NAME
    try:
        return StoredModel(directory=directory, record=msgspec.json.decode(path.read_bytes(), type=Record))
    except (msgspec.DecodeError, OSError) as error:
        raise ModelStoreError(
            f"{path} cannot be read ({error}); remove {directory} and pull the model again"
        ) from error
