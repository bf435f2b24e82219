"""Archives: the same bytes from the same tree, and no trust in anything that comes from outside."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_bundle import ARTIFACT, EPOCH, SOURCE, make_tree

from release.archive import check_checksum, entry_problems, extract, sha256_file, tree_files, write_archive
from release.errors import ArchiveError
from release.names import archive_name

NAME = archive_name(SOURCE.version, ARTIFACT, "tar.gz")
Pack = Callable[[Path], Path]


def test_byte_identical_from_two_folders(tmp_path: Path) -> None:
    out = []
    for folder, umask in (("one", 0o022), ("two/deeper", 0o077)):
        previous = os.umask(umask)
        try:
            tree = make_tree(tmp_path / folder)
            os.utime(tree / "LICENSE", (1, 1))
            (tmp_path / f"out-{umask}").mkdir()
            out.append(write_archive(tree, NAME, tmp_path / f"out-{umask}", epoch=EPOCH))
        finally:
            os.umask(previous)
    assert out[0].read_bytes() == out[1].read_bytes()


def test_round_trip(tree: Path, pack: Pack, tmp_path: Path) -> None:
    archive = pack(tree)
    assert check_checksum(archive) == sha256_file(archive)
    folder = tmp_path / "unpacked é"
    folder.mkdir()
    assert tree_files(extract(archive, folder)) == tree_files(tree)
    with pytest.raises(ArchiveError, match="not empty"):
        extract(archive, folder)


def test_a_changed_or_renamed_archive(tree: Path, pack: Pack) -> None:
    archive = pack(tree)
    renamed = archive.with_name("trivet-9.9.9-linux-x86_64-glibc-cpu.tar.gz")
    shutil.copy(archive, renamed)
    shutil.copy(f"{archive}.sha256", f"{renamed}.sha256")
    with pytest.raises(ArchiveError, match="says"):
        check_checksum(renamed)
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    with pytest.raises(ArchiveError, match="its SHA-256 is"):
        check_checksum(archive)


def _entry(name: str = "", **fields: object) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(f"{NAME.top_folder}/zz{name}")
    entry.mode = 0o644
    for field, value in fields.items():
        setattr(entry, field, value)
    return entry


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (_entry(uid=1000), "has an owner"),
        (_entry(uname="builder"), "has an owner"),
        (_entry(mode=0o666), "mode 0666"),
        (_entry(mode=0o4755), "mode 4755"),
        (_entry(type=tarfile.LNKTYPE, linkname="x"), "neither file, folder nor link"),
        (_entry(type=tarfile.CHRTYPE), "neither file, folder nor link"),
        (_entry(type=tarfile.SYMTYPE, mode=0o777, linkname="/etc/passwd"), "link out of the archive"),
        (_entry(type=tarfile.SYMTYPE, mode=0o777, linkname="../../x"), "link out of the archive"),
        (_entry("/../../x"), "outside"),
        (_entry(mtime=EPOCH + 1), "different times"),
    ],
)
def test_an_entry_that_does_not_belong(entry: tarfile.TarInfo, complaint: str) -> None:
    first = tarfile.TarInfo(NAME.top_folder)
    first.type, first.mode, first.mtime = tarfile.DIRTYPE, 0o755, EPOCH
    if not complaint.startswith("different"):
        entry.mtime = EPOCH
    assert any(complaint in text for text in entry_problems([first, entry], NAME.top_folder))


def test_doubled_and_unsorted_entries() -> None:
    entries = [_entry("b"), _entry("a"), _entry("a")]
    found = entry_problems(entries, NAME.top_folder)
    assert any("twice" in text for text in found) and any("not sorted" in text for text in found)


def test_a_bad_archive_is_not_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / str(NAME)
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(_entry(type=tarfile.SYMTYPE, mode=0o777, linkname="/tmp"))
        tar.addfile(_entry("/../../../escape", size=1), io.BytesIO(b"x"))
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(ArchiveError, match="link out of the archive"):
        extract(archive, folder)
    assert not list(folder.iterdir())
