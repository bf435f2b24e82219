"""release-matrix.json and the names that follow from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from made_up_bundle import ROOT, SOURCE

from release import __main__ as command_line
from release.archive import write_archive
from release.environment import BACK_ENDS
from release.errors import ArchiveError, MatrixError
from release.matrix import MATRIX_FILE, Matrix, asset_names, load_matrix, table
from release.names import CHECKING_FILES, archive_name, parse_archive_name, version_of_tag
from release.verify import VerifyOptions, verify

ISSUE_TUPLES = {
    "linux-x86_64-glibc-cpu", "linux-aarch64-glibc-cpu", "linux-x86_64-glibc-cuda", "linux-x86_64-glibc-vulkan",
    "linux-x86_64-musl-cpu-static", "macos-arm64-metal", "macos-arm64-metal-mlx", "windows-x86_64-cpu",
    "windows-x86_64-vulkan", "linux-aarch64-glibc-cuda", "linux-x86_64-glibc-rocm",
}  # fmt: skip
CLOSED = [entry.artifact_id for entry in load_matrix().tuples if entry.state != "buildable"]


def test_holds_every_tuple(matrix: Matrix) -> None:
    assert {entry.artifact_id for entry in matrix.tuples} == ISSUE_TUPLES
    assert matrix.find("linux-x86_64-glibc-cpu").state == "buildable"
    assert len(matrix.sms) == 10


def test_number_of_assets(matrix: Matrix) -> None:
    """Three for each tuple and two indexes, and the two files that strangers check the archives with."""
    assert len(asset_names(matrix, "1.2.3", ("release",))) == 26 + len(CHECKING_FILES)
    assert len(asset_names(matrix, "1.2.3", ("release", "windows-prerelease"))) == 32 + len(CHECKING_FILES)


@pytest.mark.parametrize("artifact_id", CLOSED)
def test_a_closed_tuple_cannot_be_built(artifact_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["build", artifact_id, "--out", str(tmp_path)]) == 1
    assert f"{artifact_id} cannot be built" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("artifact_id", CLOSED)
def test_a_closed_tuple_cannot_be_verified(artifact_id: str, matrix: Matrix, tmp_path: Path) -> None:
    entry = matrix.find(artifact_id)
    archive = tmp_path / str(archive_name("1.2.3", artifact_id, entry.archive_format))
    archive.write_bytes(b"")
    with pytest.raises(MatrixError, match="cannot be verified"):
        verify(archive, VerifyOptions(tmp_path / "evidence"))


def _changed(tmp_path: Path, artifact_id: str, **fields: Any) -> Path:
    data = json.loads(MATRIX_FILE.read_text(encoding="utf-8"))
    (entry,) = [entry for entry in data["tuples"] if entry["artifact_id"] == artifact_id]
    entry |= fields
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("artifact_id", "fields", "complaint"),
    [
        ("linux-x86_64-glibc-cpu", {"state": "blocked"}, "reason"),
        ("linux-x86_64-glibc-rocm", {"state": "buildable"}, "reason"),
        ("linux-x86_64-glibc-rocm", {"by_hand": "no machine"}, "built by hand and not buildable"),
        ("linux-x86_64-glibc-rocm", {"max_channel": "preview"}, "max_channel"),
        ("linux-x86_64-musl-cpu-static", {"state": "ok"}, "state 'ok'"),
        ("macos-arm64-metal", {"archive_format": "zip"}, "zip"),
        ("linux-x86_64-glibc-cuda", {"sms": ["80", "90a"]}, "fat"),
        ("linux-x86_64-glibc-vulkan", {"libc": "musl"}, "spell"),
        ("macos-arm64-metal-mlx", {"backend": "metal"}, "spell"),
    ],
)
def test_each_policy_is_enforced(artifact_id: str, fields: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=complaint):
        load_matrix(_changed(tmp_path, artifact_id, **fields))


def test_name_round_trip(matrix: Matrix) -> None:
    for entry in matrix.tuples:
        name = archive_name("1.2.3", entry.artifact_id, entry.archive_format)
        assert parse_archive_name(str(name)) == name
        assert name.companions == (f"{name}.sha256", f"{name}.provenance.json")


@pytest.mark.parametrize(
    "name",
    [
        "trivet-linux-x86_64-glibc-cpu.tar.gz",
        "trivet-1.2-linux-x86_64-glibc-cpu.tar.gz",
        "trivet-v1.2.3-linux-x86_64-glibc-cpu.tar.gz",
        "trivet-1.2.3-x86_64-linux-glibc-cpu.tar.gz",
        "trivet-1.2.3-linux-x86_64-glibc-cpu-fast-stable.tar.gz",
        "trivet-1.2.3-linux-x86_64-glibc-cpu.tgz",
        "Trivet-1.2.3-linux-x86_64-glibc-cpu.tar.gz",
        "../trivet-1.2.3-linux-x86_64-glibc-cpu.tar.gz",
    ],
)
def test_other_spellings_are_refused(name: str) -> None:
    with pytest.raises(ArchiveError, match="no release archive name"):
        parse_archive_name(name)


@pytest.mark.parametrize(
    "tag", ["1.2.3", "v1.2", "v1.2.3; rm -rf x", "v1.2.3\n", "$(id)", "v01.2.3", "refs/tags/v1.2.3"]
)
def test_tags_are_untrusted(tag: str) -> None:
    with pytest.raises(ArchiveError, match="no release tag"):
        version_of_tag(tag)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_plan_refuses_the_tag_of_another_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plan", "v99.0.0"]) == 1
    assert "the version of the tree is" in capsys.readouterr().err


def test_no_zip_is_written(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"only tar\.gz"):
        write_archive(tmp_path, archive_name(SOURCE.version, "windows-x86_64-cpu", "zip"), tmp_path, epoch=0)


def test_nothing_else_spells_an_archive_name() -> None:
    """Names come from names.py; a second spelling would drift."""
    for path in [*ROOT.glob("release/*.py"), *ROOT.glob("packaging/**/*.py")]:
        if path.name != "names.py":
            assert "-linux-x86_64-glibc-cpu.tar" not in path.read_text(encoding="utf-8"), path


def test_no_back_end_is_left_to_chance() -> None:
    """What CMake would decide by the machine (AUTO), a release decides itself."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "backends").glob("*/CMakeLists.txt")]
    automatic = {name for text in texts for name in re.findall(r"set\((TRIVET_\w+) AUTO CACHE", text)}
    for settings in BACK_ENDS.values():
        chosen = dict(setting.split("=", 1) for setting in settings)
        assert automatic == set(chosen) and "AUTO" not in chosen.values()
    assert {entry.backend for entry in load_matrix().tuples if entry.state == "buildable"} <= set(BACK_ENDS)


def test_readers_see_the_matrix(matrix: Matrix) -> None:
    """The table of release/README.md is the matrix; one cannot change without the other."""
    text = (ROOT / "release" / "README.md").read_text(encoding="utf-8")
    assert "\n".join(table(matrix)) in text
