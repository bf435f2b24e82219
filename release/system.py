"""The system that a program is frozen from: this machine's, or for another architecture a Debian 12 that is emulated.

Such a system is made of Debian's packages without running any of them, once for each list of packages, and kept in the
cache. Its Python runs on an emulated CPU, which is slow: only what must run there does; wheels are fetched and code is
compiled on this machine.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .architectures import Architecture, architecture_of
from .emulation import emulated, missing_tools
from .errors import BuildError
from .process import run
from .root import cache_folder, make_whole

SUITE = "bookworm"  # Debian 12: glibc 2.36
PACKAGES = (
    "base-files", "bash", "binutils", "coreutils", "dash", "libc-bin", "libpython3.11", "libstdc++6", "python3.11",
)  # fmt: skip
PYTHON = Path("/usr/bin/python3.11")  # inside
_SECONDS = 3600.0
# Enter a system: its files below a layer that is thrown away, and some folders of this machine at their own places.
# Arguments: ROOT FOLDER... -- COMMAND; the first folder is where the command starts.
_ENTER = """
set -e
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o "lowerdir=$1,upperdir=/mnt/upper,workdir=/mnt/work" /mnt/root
start=$2
shift
for folder in /proc /dev "$@"; do
  [ "$folder" != -- ] || break
  mkdir -p "/mnt/root$folder"
  mount --rbind "$folder" "/mnt/root$folder"
done
while [ "$1" != -- ]; do shift; done
shift
set -- chroot /mnt/root /bin/sh -c 'cd "$0"; exec "$@"' "$start" "$@"
"""


@dataclass(frozen=True, slots=True)
class System:
    architecture: Architecture
    root: Path  # "/" = this machine's

    @property
    def is_foreign(self) -> bool:
        return self.root != Path("/")

    def run(self, command: Sequence[str | Path], folders: Sequence[Path], env: Mapping[str, str] | None = None) -> str:
        """Run a program of the system in the first of `folders`, which are all it sees of this machine; its stdout."""
        if not self.is_foreign:
            return run(command, cwd=folders[0], env=env)
        if missing := missing_tools(self.architecture):
            raise BuildError(missing)
        words = [str(word) for word in (self.root, *folders, "--", *command)]
        cpu = tuple(self.architecture.best_tiers)[-1]
        return run(emulated(self.architecture, cpu, words, setup=_ENTER), env=env, timeout=_SECONDS)

    def path(self, path: str | Path) -> Path:
        """Where a file of the system lies for programs of this machine."""
        return self.root / str(path).lstrip("/")


def system_for(architecture: str) -> System:
    """This machine, if it is of that architecture; else a Debian that is, from the cache or made now."""
    found = architecture_of(architecture)
    if found.is_native:
        return System(found, Path("/"))
    digest = hashlib.sha256("\n".join([found.debian, SUITE, *PACKAGES]).encode()).hexdigest()
    folder = cache_folder() / f"system-{found.debian}-{digest[:16]}"
    if not folder.is_dir():
        make_whole(folder, lambda making: _make(making, found))
    return System(found, folder)


def _make(folder: Path, architecture: Architecture) -> None:
    if shutil.which("mmdebstrap") is None:
        raise BuildError(f"a system of {architecture.debian} is made with mmdebstrap, which is not installed")
    run(
        [
            "mmdebstrap",
            "--quiet",
            "--variant=extract",
            f"--architectures={architecture.debian}",
            f"--include={','.join(PACKAGES)}",
            "--skip=cleanup",
            SUITE,
            folder,
        ],
        timeout=_SECONDS,
    )
    archives = folder / "var/cache/apt/archives"
    record_packages(folder, sorted(archives.glob("*.deb")))
    for name in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(folder / name)


def record_packages(folder: Path, packages: Sequence[Path]) -> None:
    """Tell the system's dpkg what was unpacked, so that it knows which package a file is of."""
    database = folder / "var/lib/dpkg"
    (database / "info").mkdir(parents=True, exist_ok=True)
    (database / "info/format").write_text("1\n")
    status = []
    for package in packages:
        control = run(["dpkg-deb", "-f", package])
        fields = dict(line.split(": ", 1) for line in control.splitlines() if ": " in line and line[0] != " ")
        status.append(f"{control.rstrip()}\nStatus: install ok installed\n")
        suffix = f":{fields['Architecture']}" if fields.get("Multi-Arch") == "same" else ""
        names = [line.split(None, 5)[5].split(" -> ")[0] for line in run(["dpkg-deb", "-c", package]).splitlines()]
        files = "".join(f"{name[1:].rstrip('/') or '/.'}\n" for name in names)
        (database / "info" / f"{fields['Package']}{suffix}.list").write_text(files)
    (database / "status").write_text("\n".join(status))
