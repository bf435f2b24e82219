"""Fixtures of the release tests: the made-up bundle of tests/tools/made_up_bundle.py, packed and with keys."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_bundle import ARTIFACT, EPOCH, SOURCE, Manifest, make_manifest_without_itself, make_tree, verified

from release import provenance
from release.archive import sha256_file, write_archive
from release.matrix import Matrix, load_matrix
from release.names import archive_name


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return load_matrix()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return make_tree(folder)


@pytest.fixture
def manifest(tree: Path) -> Manifest:
    """Valid, with every boolean true: channel stable."""
    return verified(make_manifest_without_itself(tree))


@pytest.fixture
def pack(tmp_path: Path) -> Callable[[Path], Path]:
    """Pack a tree as the archive of its manifest."""

    def packed(tree: Path) -> Path:
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        return write_archive(tree, archive_name(SOURCE.version, ARTIFACT, "tar.gz"), out, epoch=EPOCH)

    return packed


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two key pairs: ours and somebody else's."""
    folder = tmp_path_factory.mktemp("keys")
    out: dict[str, Path] = {}
    for name in ("ours", "theirs"):
        private, public = folder / f"{name}.key", folder / f"{name}.pub"
        subprocess.run(
            ["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True, capture_output=True
        )
        subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
        out |= {name: private, f"{name}.pub": public}
    return out


@pytest.fixture
def archive(tmp_path: Path, keys: dict[str, Path]) -> Path:
    """A packed bundle with signed provenance that carries its evidence: what a release folder holds."""
    tree = make_tree(tmp_path / "tree")
    out = tmp_path / "release"
    out.mkdir()
    archive = write_archive(tree, archive_name(SOURCE.version, ARTIFACT, "tar.gz"), out, epoch=EPOCH)
    manifest = make_manifest_without_itself(tree)
    manifest = verified(manifest, sha256_file(archive), archive.name, archive.stat().st_size)
    provenance.write_envelope(provenance.statement(manifest, archive, epoch=EPOCH), archive, keys["ours"])
    return archive
