"""`release oci`: an OCI image layout of a verified CPU archive, written without a container engine.

Two layers: the C library of the system, because an image brings its own, and the bundle as the archive holds it.
The same archive and C library give the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from .archive import check_checksum, extract
from .errors import BuildError
from .manifest import MANIFEST_NAME, check_manifest
from .matrix import load_matrix
from .names import parse_archive_name
from .process import run
from .system import System, system_for

PREFIX = "opt/trivet"  # of the bundle inside the image
PORT = 8000
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LAYER, _CONFIG = "application/vnd.oci.image.layer.v1.tar+gzip", "application/vnd.oci.image.config.v1+json"
_MANIFEST, _INDEX = "application/vnd.oci.image.manifest.v1+json", "application/vnd.oci.image.index.v1+json"
# What is kept of the C library's package; the rest is documentation, characters and programs.
_LIBC_KEPT = ("lib/", "lib64/", "usr/lib/", "usr/lib64/", "usr/share/doc/libc6/copyright")
_LIBC_DROPPED = ("gconv", "getconf", "/audit/")
_ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/sbin/nologin\ntrivet:x:10001:10001:trivet:/var/lib/trivet:/sbin/nologin\n",
    "etc/group": "root:x:0:\ntrivet:x:10001:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def write_image(archive: Path, out: Path) -> str:
    """Write the layout into `out` (new or empty); the digest of the image's manifest. Only CPU tuples have images."""
    name = parse_archive_name(archive.name)
    entry = load_matrix().require_buildable(name.artifact_id, "made an image")
    if entry.backend != "cpu" or entry.arch not in _ARCHITECTURES:
        raise BuildError(f"{name.artifact_id} has no image: images are made of Linux CPU bundles")
    check_checksum(archive)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise BuildError(f"{out} is not empty")
    with tempfile.TemporaryDirectory(prefix="trivet-oci-") as work:
        (Path(work) / "bundle").mkdir()
        tree = extract(archive, Path(work) / "bundle")
        manifest = json.loads((tree / MANIFEST_NAME).read_text(encoding="utf-8"))
        check_manifest(manifest, load_matrix())
        epoch = int((tree / MANIFEST_NAME).stat().st_mtime)
        base, libc_version = _libc_root(Path(work), system_for(entry.arch))
        layers = [_layer({"": base}, epoch), _layer({PREFIX: tree, "var/lib/trivet": None}, epoch)]
    return _write_layout(out, layers, manifest, _ARCHITECTURES[entry.arch], libc_version, epoch)


def _libc_root(work: Path, system: System) -> tuple[Path, str]:
    """A folder with the files of the system's C library, as its package lists them; and the version of that."""
    query = ["dpkg-query", f"--admindir={system.path('/var/lib/dpkg')}"]
    package = f"libc6:{system.architecture.debian}"
    kept = work / "root"
    for name in run([*query, "-L", package]).splitlines():
        path, relative = system.path(name), name.lstrip("/")
        if path.is_dir() and not path.is_symlink():
            continue
        if relative.startswith(_LIBC_KEPT) and not any(part in relative for part in _LIBC_DROPPED):
            target = kept / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target, follow_symlinks=False)
    for relative, text in _ACCOUNTS.items():
        (kept / relative).parent.mkdir(parents=True, exist_ok=True)
        (kept / relative).write_text(text, encoding="ascii")
    (kept / "tmp").mkdir()
    return kept, run([*query, "-W", "-f", "${Version}", package])


def _layer(trees: dict[str, Path | None], epoch: int) -> tuple[bytes, str]:
    """(compressed layer, digest of the uncompressed one); tree None = an empty folder that the program may write to."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for prefix, tree in trees.items():
            parts = [part for part in prefix.split("/") if part]
            for depth in range(1, len(parts) + 1):
                writable = tree is None and depth == len(parts)
                _add(tar, "/".join(parts[:depth]), None, epoch, owner=10001 if writable else 0)
            for path in sorted(tree.rglob("*") if tree is not None else [], key=lambda item: item.as_posix().encode()):
                assert tree is not None
                _add(tar, "/".join([*parts, path.relative_to(tree).as_posix()]), path, epoch)
    data = plain.getvalue()
    return gzip.compress(data, 9, mtime=0), f"sha256:{hashlib.sha256(data).hexdigest()}"


def _add(tar: tarfile.TarFile, name: str, path: Path | None, epoch: int, owner: int = 0) -> None:
    entry = tarfile.TarInfo(name)
    entry.mtime, entry.uid, entry.gid = epoch, owner, owner
    if path is None or (path.is_dir() and not path.is_symlink()):
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
        tar.addfile(entry)
    elif path.is_symlink():
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
        tar.addfile(entry)
    else:
        entry.size, entry.mode = path.stat().st_size, 0o755 if path.stat().st_mode & 0o100 else 0o644
        with path.open("rb") as file:
            tar.addfile(entry, file)


def _write_layout(
    out: Path, layers: list[tuple[bytes, str]], manifest: dict[str, Any], arch: str, libc_version: str, epoch: int
) -> str:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    labels = {
        "org.opencontainers.image.title": "trivet",
        "org.opencontainers.image.version": manifest["version"],
        "org.opencontainers.image.revision": manifest["source"]["commit"],
        "org.opencontainers.image.licenses": "Apache-2.0",
        "ai.trivet.artifact-id": manifest["artifact_id"],
        "ai.trivet.libc6": libc_version,
    }
    config = {
        "created": created,
        "architecture": arch,
        "os": "linux",
        "config": {
            "User": "10001:10001",
            "ExposedPorts": {f"{PORT}/tcp": {}},
            "Env": ["PATH=/opt/trivet/bin", "HOME=/var/lib/trivet", "LANG=C.UTF-8", "ORT_DISABLE_TELEMETRY=1"],
            "Entrypoint": [f"/{PREFIX}/bin/trivet", "serve", "--host", "0.0.0.0", "--port", str(PORT)],
            "WorkingDir": "/var/lib/trivet",
            "StopSignal": "SIGTERM",
            "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id in layers]},
        "history": [{"created": created, "created_by": f"release oci: {what}"} for what in ("libc6", "bundle")],
    }
    described = [_blob(out, data, _LAYER) for data, _ in layers]
    image = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _blob(out, _json(config), _CONFIG),
        "layers": described,
        "annotations": labels,
    }
    reference = _blob(out, _json(image), _MANIFEST)
    reference["platform"] = {"architecture": arch, "os": "linux"}
    reference["annotations"] = {"org.opencontainers.image.ref.name": f"{manifest['version']}-cpu"}
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [reference]}
    (out / "index.json").write_bytes(_json(index))
    (out / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return str(reference["digest"])


def _blob(out: Path, data: bytes, media_type: str) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    folder = out / "blobs" / "sha256"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
