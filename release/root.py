"""The release root: a Debian 11 system with an OpenSSL 3 and a CPython 3.11 of its own, in which releases are built.

What is compiled there needs no newer C library than that system's. A root is made once for each content of release/root
and kept in the cache; builds mount it read-only and see nothing of the machine but their own folder, the cache of
compiled wheels, the C API headers of onnxruntime, and the network settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .archive import sha256_file
from .errors import BuildError
from .process import run
from .source import ROOT, copy_source

RECIPE = Path(__file__).with_name("root")
SUITE = "bullseye"  # Debian 11: glibc 2.31
SOURCE_SUITE = "bookworm"  # Debian 12, whose security updates of OpenSSL and CPython are compiled
FACTS = Path("usr/local/share/trivet-root/root.json")
PYTHON = Path("/usr/local/bin/python3.11")  # inside
MOUNT_POINTS = ("build", "cache", "headers", "sources")
# Of the machine: how a build reaches the package index. A root in the making has its own.
_NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs", "/etc/pip.conf")
_COMPILE_SECONDS = 3 * 3600.0
# Arguments: ROOT, then TARGET=SOURCE for each mount ("ro:" before SOURCE: read-only), then --, then the command.
_ENTER = """
set -eu
root=$1; shift
mount --bind "$root" "$root"
for folder in proc dev; do mount --rbind "/$folder" "$root/$folder"; done
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/build"
while [ "$1" != -- ]; do
  target=$root${1%%=*} source=${1#*=}; shift
  if [ -d "${source#ro:}" ]; then mkdir -p "$target"; else touch "$target"; fi
  mount --bind "${source#ro:}" "$target"
  case $source in ro:*) mount -o remount,ro,bind "$target" ;; esac
done
shift
[ "${TRIVET_ROOT_WRITABLE-}" ] || mount -o remount,ro,bind "$root"
exec chroot "$root" "$@"
"""
# The network settings of the user that a build inherits.
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_NETWORK_SETTINGS = ("PIP_INDEX_URL", "PIP_CERT", *_PROXIES)


@dataclass(frozen=True, slots=True)
class Pin:
    package: str  # Debian's name of the source package
    version: str
    files: Mapping[str, str]  # file name -> SHA-256


def cache_folder() -> Path:
    """Where roots and wheels compiled for the bundle are kept: $TRIVET_RELEASE_CACHE, else the user's cache."""
    if chosen := os.environ.get("TRIVET_RELEASE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trivet" / "build" / "release"


def inside() -> dict[str, Any] | None:
    """What the root says about itself, if this process runs in one; else None."""
    path = Path("/", FACTS)
    if not path.is_file():
        return None
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts


def make_whole(folder: Path, make: Callable[[Path], object]) -> None:
    """Have `make` fill a folder under another name, then give it this one: `folder` is whole or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        make(making)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    if folder.exists():  # another build was faster
        shutil.rmtree(making)
    else:
        making.rename(folder)


def recipe_digest() -> str:
    """Digest of everything that decides about a root: its recipe, this module's suites, the architecture."""
    content = [f"{path.name} {sha256_file(path)}" for path in sorted(RECIPE.iterdir()) if path.is_file()]
    return hashlib.sha256("\n".join([*content, SUITE, SOURCE_SUITE, platform.machine()]).encode()).hexdigest()


def ensure_root() -> Path:
    """The root of this recipe, from the cache or made now; BuildError says what is missing to make one."""
    digest = recipe_digest()
    root = cache_folder() / f"root-{digest[:16]}"
    if (root / FACTS).is_file():
        return root
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise BuildError(
            "the release recipe builds in a Debian 11 root, which is made with debootstrap by the superuser: "
            "install debootstrap and run this with sudo, or use --recipe quick"
        )
    make_whole(root, lambda making: _make(making, digest))
    return root


def build_inside(artifact_id: str, work: Path, options: Sequence[str] = ()) -> Path:
    """Run `release build`, with more `options`, on a copy of the tree in the root; the folder below `work` it filled.

    The copy lies in a folder of the same name as `work`, so two builds run in different places inside, too.
    """
    root = ensure_root()
    copy_source(work / "source")
    folder = f"/build/{work.name}"
    headers = run([sys.executable, ROOT / "cmake" / "ort_headers.py"]).strip()
    settings = {name: value for name in _NETWORK_SETTINGS if (value := os.environ.get(name))}
    settings |= {"TRIVET_RELEASE_CACHE": "/cache", "ORT_INCLUDE_DIR": "/headers", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(PYTHON), "-m", "release", "build", artifact_id, "--recipe", "release", *options]
    enter(
        root,
        [*command, "--out", f"{folder}/out", "--work", folder],
        mounts={folder: str(work), "/cache": str(cache_folder()), "/headers": f"ro:{headers}"},
        settings=settings,
        folder=f"{folder}/source",
    )
    return work / "out"


def read_pins(path: Path = RECIPE / "sources.txt") -> list[Pin]:
    """Source packages and their files; BuildError for a line that is neither."""
    pins: list[tuple[str, str, dict[str, str]]] = []
    for line in path.read_text(encoding="ascii").splitlines():
        if not line or line.startswith("#"):
            continue
        name, separator, version = line.partition("=")
        digest, _, file = line.partition("  ")
        if separator and " " not in line:
            pins.append((name, version, {}))
        elif pins and len(digest) == 64 and file:
            pins[-1][2][file] = digest
        else:
            raise BuildError(f"{path.name}: {line!r} is neither PACKAGE=VERSION nor SHA256  FILE")
    return [Pin(*pin) for pin in pins]


def _make(making: Path, digest: str) -> None:
    debootstrap: list[str | Path] = ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, making]
    # What it mounts ends with it, also when it fails: a half-made root can be deleted.
    run(["unshare", "--mount", "--propagation", "private", *debootstrap], timeout=_COMPILE_SECONDS)
    for name in MOUNT_POINTS:
        (making / name).mkdir()
    (making / "etc/pip.conf").touch()
    _write_apt_sources(making / "etc/apt/sources.list")
    apt = ["apt-get", "-q", "-y", "--no-install-recommends", "-o", "APT::Sandbox::User=root"]
    packages = [line for line in (RECIPE / "packages.txt").read_text("ascii").splitlines() if not line.startswith("#")]
    _change(making, [*apt, "update"])
    _change(making, [*apt, "dist-upgrade"])
    _change(making, [*apt, "install", *packages])
    pins = read_pins()
    fetch = " ".join(f"{pin.package}={pin.version}" for pin in pins)
    _change(
        making, ["sh", "-euc", f"cd /sources; apt-get -q -o APT::Sandbox::User=root source --download-only {fetch}"]
    )
    check_sources(making / "sources", pins)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"]
    run([*pip, "-d", making / "sources", "-r", RECIPE / "pip.txt"])
    shutil.copyfile(RECIPE / "compile.sh", making / "sources" / "compile.sh")
    _change(making, ["sh", "/sources/compile.sh"])
    _write_facts(making, digest, pins)
    _change(making, ["sh", "-euc", "apt-get clean; rm -rf /sources/* /var/lib/apt/lists/*"])


def _write_apt_sources(path: Path) -> None:
    """Add security updates, and the sources of the newer suite, from the mirror that debootstrap chose."""
    mirror = path.read_text(encoding="utf-8").split()[1].rstrip("/")
    path.write_text(
        f"deb {mirror} {SUITE} main\n"
        f"deb {mirror}-security {SUITE}-security main\n"
        f"deb-src {mirror} {SOURCE_SUITE} main\n"
        f"deb-src {mirror}-security {SOURCE_SUITE}-security main\n",
        encoding="utf-8",
    )


def check_sources(folder: Path, pins: Sequence[Pin]) -> None:
    """BuildError unless every pinned file is there with its digest."""
    for pin in pins:
        for name, digest in pin.files.items():
            path = folder / name
            if not path.is_file():
                raise BuildError(f"{pin.package} {pin.version} came without {name}; release/root/sources.txt names it")
            if (found := sha256_file(path)) != digest:
                raise BuildError(f"{name} has the SHA-256 {found}, release/root/sources.txt says {digest}")


def _change(making: Path, command: Sequence[str]) -> None:
    enter(making, command, mounts={}, settings={"DEBIAN_FRONTEND": "noninteractive"}, writable=True)


def _write_facts(making: Path, digest: str, pins: Sequence[Pin]) -> None:
    listing = enter(making, ["dpkg-query", "-W", "-f", "${Package} ${Version}\\n"], mounts={}, settings={})
    facts = {
        "recipe_sha256": digest,
        "suite": SUITE,
        "packages": dict(line.split(" ", 1) for line in sorted(listing.splitlines())),
        "compiled": {pin.package: pin.version for pin in pins},
    }
    (making / FACTS).parent.mkdir(parents=True, exist_ok=True)
    (making / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def enter(
    root: Path,
    command: Sequence[str],
    *,
    mounts: Mapping[str, str],
    settings: Mapping[str, str],
    writable: bool = False,
    folder: str = "/",
) -> str:
    """Run `command` in `root` and return its stdout.

    `mounts`: path inside -> path outside, "ro:" before the latter = read-only; `settings`: its environment.
    """
    network = {path: f"ro:{path}" for path in _NETWORK_FILES if Path(path).exists()} if not writable else {}
    words = [f"{target}={source}" for target, source in {**network, **mounts}.items()]
    environment = {
        "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        **settings,
    }
    if writable:
        environment["TRIVET_ROOT_WRITABLE"] = "1"
    inner = ["/bin/sh", "-euc", 'cd "$0"; exec "$@"', folder, *command]
    unshare = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _ENTER, "enter", str(root)]
    return run([*unshare, *words, "--", *inner], env=environment, timeout=_COMPILE_SECONDS)
