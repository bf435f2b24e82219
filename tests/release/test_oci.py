"""The OCI image layout: digests that fit, the bundle and the C library inside, the same bytes again."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from release import oci
from release.archive import sha256_file
from release.errors import BuildError, MatrixError
from release.oci import write_image
from release.system import System


@pytest.fixture
def archive(tree: Path, pack: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packed bundle; the C library is made up, as not every system has dpkg."""

    def libc_root(work: Path, system: System) -> tuple[Path, str]:
        root = work / "root"
        (root / "lib64").mkdir(parents=True)
        (root / "tmp").mkdir()
        (root / "lib64" / "ld-linux-x86-64.so.2").write_bytes(b"loader")
        return root, "2.36-9"

    monkeypatch.setattr(oci, "_libc_root", libc_root)
    return pack(tree)


def blob(layout: Path, descriptor: dict[str, Any]) -> bytes:
    data: bytes = (layout / "blobs" / "sha256" / descriptor["digest"].removeprefix("sha256:")).read_bytes()
    assert descriptor["size"] == len(data)
    assert descriptor["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    return data


def test_layout(archive: Path, tmp_path: Path) -> None:
    layout = tmp_path / "image"
    digest = write_image(archive, layout)
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    (reference,) = json.loads((layout / "index.json").read_text())["manifests"]
    assert (
        reference["digest"] == digest and reference["annotations"]["org.opencontainers.image.ref.name"] == "1.2.3-cpu"
    )
    image = json.loads(blob(layout, reference))
    config = json.loads(blob(layout, image["config"]))
    assert config["config"]["Entrypoint"][:2] == ["/opt/trivet/bin/trivet", "serve"]
    assert (config["architecture"], config["config"]["User"], config["config"]["StopSignal"]) == (
        "amd64",
        "10001:10001",
        "SIGTERM",
    )
    names = []
    for descriptor, diff_id in zip(image["layers"], config["rootfs"]["diff_ids"], strict=True):
        plain = gzip.decompress(blob(layout, descriptor))
        assert diff_id == f"sha256:{hashlib.sha256(plain).hexdigest()}"
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            names.append({entry.name: entry for entry in tar})
    assert "lib64/ld-linux-x86-64.so.2" in names[0] and names[0]["tmp"].mode == 0o1777
    assert names[1]["opt/trivet/trivet"].mode == 0o755 and names[1]["opt/trivet/bin/trivet"].issym()
    assert names[1]["var/lib/trivet"].uid == 10001


def test_the_same_bytes_again(archive: Path, tmp_path: Path) -> None:
    assert write_image(archive, tmp_path / "one") == write_image(archive, tmp_path / "two")
    files = [
        {path.name: sha256_file(path) for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in ("one", "two")
    ]
    assert files[0] == files[1]


def test_what_has_no_image(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="cannot be made an image"):
        write_image(archive.with_name("trivet-1.2.3-linux-x86_64-glibc-rocm.tar.gz"), tmp_path / "image")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(BuildError, match="is not empty"):
        write_image(archive, tmp_path / "full")
