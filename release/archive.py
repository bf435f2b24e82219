"""Release archives: a writer whose output depends on nothing but the tree, and a reader that trusts nothing."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import ArchiveError
from .names import CHECKSUM_SUFFIX, ArchiveName, parse_archive_name


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_files(root: Path) -> list[dict[str, Any]]:
    """Every file and link under `root` as the manifest lists them, sorted by path."""
    out: list[dict[str, Any]] = []
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            out.append({"path": name, "link": os.readlink(path)})
        elif path.is_file():
            mode = "0755" if path.stat().st_mode & 0o100 else "0644"
            out.append({"path": name, "mode": mode, "size": path.stat().st_size, "sha256": sha256_file(path)})
    return sorted(out, key=lambda entry: str(entry["path"]))


def write_archive(root: Path, name: ArchiveName, folder: Path, *, epoch: int) -> Path:
    """Pack `root` as folder/name and write its checksum beside it. The same tree and epoch give the same bytes."""
    if name.format != "tar.gz":
        raise ArchiveError(f"{name}: only tar.gz archives can be written; no zip tuple is buildable")
    target = folder / str(name)
    paths = sorted(root.rglob("*"), key=lambda path: path.relative_to(root).as_posix().encode())
    with (
        target.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        _add(tar, root, name.top_folder, epoch)
        for path in paths:
            _add(tar, path, f"{name.top_folder}/{path.relative_to(root).as_posix()}", epoch)
    Path(f"{target}{CHECKSUM_SUFFIX}").write_text(f"{sha256_file(target)}  {name}\n", encoding="ascii")
    return target


def _add(tar: tarfile.TarFile, path: Path, name: str, epoch: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.mtime = epoch
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
        tar.addfile(entry)
    elif stat.S_ISDIR(status.st_mode):
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(entry)
    elif stat.S_ISREG(status.st_mode):
        entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
        with path.open("rb") as file:
            tar.addfile(entry, file)
    else:
        raise ArchiveError(f"{path} is neither file, folder nor link")


def check_checksum(archive: Path) -> str:
    """The archive's SHA-256, if the file beside it says the same about the same name."""
    beside = Path(f"{archive}{CHECKSUM_SUFFIX}")
    try:
        words = beside.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ArchiveError(f"{beside.name} cannot be read: {error}") from error
    digest = sha256_file(archive)
    if words != [digest, archive.name]:
        raise ArchiveError(f"{archive.name}: its SHA-256 is {digest}; {beside.name} says {' '.join(words)!r}")
    return digest


def extract(archive: Path, folder: Path) -> Path:
    """Unpack into `folder`, which must be empty, and return the one folder inside. Every entry is judged first."""
    name = parse_archive_name(archive.name)
    if any(folder.iterdir()):
        raise ArchiveError(f"{folder} is not empty; an archive is judged in a folder of its own")
    with tarfile.open(archive, mode="r:gz") as tar:
        entries = tar.getmembers()
        if found := entry_problems(entries, name.top_folder):
            raise ArchiveError(f"{archive.name}:\n  " + "\n  ".join(found))
        previous = os.umask(0o022)
        try:
            if hasattr(tarfile, "tar_filter"):
                tar.extractall(folder, filter="tar")
            else:  # Debian 12's Python; the entries were judged above
                tar.extractall(folder)
        finally:
            os.umask(previous)
    return folder / name.top_folder


def entry_problems(entries: Iterable[tarfile.TarInfo], top: str) -> list[str]:
    """What no canonical archive holds: foreign paths, escaping links, doubled or unsorted names, owners, odd modes."""
    entries = list(entries)
    out = []
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        out.append(f"twice: {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
    if len({entry.mtime for entry in entries}) > 1:
        out.append("entries have different times")
    if [name.encode() for name in names] != sorted(name.encode() for name in names):
        out.append("entries are not sorted")
    for entry in entries:
        path = PurePosixPath(entry.name)
        if path.parts[0] != top or ".." in path.parts or path.is_absolute():
            out.append(f"outside {top}/: {entry.name}")
        if entry.uid or entry.gid or entry.uname or entry.gname:
            out.append(f"has an owner: {entry.name}")
        expected = {tarfile.DIRTYPE: (0o755,), tarfile.SYMTYPE: (0o777,), tarfile.REGTYPE: (0o644, 0o755)}.get(
            entry.type
        )
        if expected is None:
            out.append(f"neither file, folder nor link: {entry.name}")
        elif entry.mode not in expected:
            out.append(f"mode {entry.mode:04o}: {entry.name}")
        if entry.issym() and not _stays_inside(path, entry.linkname, top):
            out.append(f"link out of the archive: {entry.name} -> {entry.linkname}")
    return out


def _stays_inside(path: PurePosixPath, target: str, top: str) -> bool:
    if PurePosixPath(target).is_absolute():
        return False
    resolved = os.path.normpath(path.parent / target)
    return resolved == top or resolved.startswith(f"{top}/")
