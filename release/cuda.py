"""libtrivet_cuda of a release: code for all SMs, by pinned compilers, once for each set of inputs.

Ten SMs take twenty to sixty minutes of CPU time, so the library is kept in the cache under a hash of all that decides
about its bytes. An interrupted compilation goes on where it was.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .archive import sha256_file
from .errors import BuildError
from .process import run
from .root import cache_folder, inside, make_whole
from .source import ROOT, copy_source

PINS = ROOT / "packaging" / "pyinstaller"
COMPILERS, READER = PINS / "requirements-cuda.txt", PINS / "requirements-cuobjdump.txt"
LIBRARY = "libtrivet_cuda.so"
_CMAKE_OPTIONS = (
    "-G", "Unix Makefiles", "-DCMAKE_BUILD_TYPE=Release", "-DTRIVET_CUDA=ON", "-DTRIVET_CUDA_ARCHITECTURES=",
)  # fmt: skip
# All that CMake reads for this library.
_SOURCES = ("CMakeLists.txt", "cmake", "backends/CMakeLists.txt", "backends/common", "backends/cuda")
_COMPILE_SECONDS = 24 * 3600.0
# nvcc names kernels after a hash that paths go into: a compilation sees its folders where every other one sees its own.
_INSIDE = Path("/mnt")
_ENTER = f"""
mount -t tmpfs tmpfs {_INSIDE}
mkdir {_INSIDE}/work {_INSIDE}/packages
mount --bind "$1" {_INSIDE}/work
mount --bind "$2" {_INSIDE}/packages
shift 2
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class CudaLibrary:
    path: Path
    packages: Path  # folder with the metadata and licences of what was compiled in
    toolchain: dict[str, str]  # for the manifest


def cuda_library(work: Path, *, fresh: bool) -> CudaLibrary:
    """The library, from the cache or compiled now; `fresh`: compiled now, in `work`, whatever the cache holds."""
    packages = pinned_packages(COMPILERS)
    toolchain = {
        "nvcc": run([_program(packages, "nvcc"), "--version"]).split("release ")[1].splitlines()[0],
        "CUDA packages": sha256_file(COMPILERS),
    }
    if fresh:
        return CudaLibrary(_compile(work / "cuda", packages), packages, toolchain)
    folder = cache_folder() / f"cuda-{inputs_digest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        path = folder / LIBRARY
        if not path.is_file():
            _compile(folder / "making", packages).rename(path)
            shutil.rmtree(folder / "making")
    return CudaLibrary(path, packages, toolchain)


def cuobjdump() -> Path:
    """The pinned program that reads machine code."""
    return _program(pinned_packages(READER), "cuobjdump")


def pinned_packages(pins: Path) -> Path:
    """The folder that holds the packages of this list, from the cache or installed now."""
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()
    folder = cache_folder() / f"{pins.stem.removeprefix('requirements-')}-packages-{digest[:16]}"
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile", "--no-deps"]
        checked: list[str | Path] = [*pip, "--require-hashes", "--only-binary", ":all:", "-r", pins]
        make_whole(folder, lambda making: run([*checked, "--target", making]))
    return folder


def inputs_digest() -> str:
    """Of all that decides about the library; flags and SMs are in the sources CMakeLists.txt and kernels.json."""
    headers = Path(run([sys.executable, ROOT / "cmake" / "ort_headers.py"]).strip())
    inputs = {
        "sources": {name: sha256_file(ROOT / name) for name in _source_names()},
        "options": _CMAKE_OPTIONS,
        "place": str(_INSIDE),
        "headers": {path.name: sha256_file(path) for path in sorted(headers.glob("*.h"))},
        "packages": COMPILERS.read_text(encoding="ascii"),
        "compiler": run(["c++", "--version"]).splitlines()[0],
        "root": (inside() or {}).get("recipe_sha256"),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _source_names() -> list[str]:
    """Below _SOURCES, without the Python side and what was built there."""
    found = [
        path for name in _SOURCES for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    names = sorted(path.relative_to(ROOT).as_posix() for path in found if path.is_file())
    return [name for name in names if not name.endswith((".so", ".py", ".pyc"))]


def _program(packages: Path, name: str) -> Path:
    (found,) = packages.glob(f"nvidia/*/bin/{name}")
    return found


def _compile(folder: Path, packages: Path) -> Path:
    """Compile it below `folder`, where a compilation may have begun; the stripped library."""
    if not (folder / "build").is_dir():
        shutil.rmtree(folder / "source", ignore_errors=True)
        copy_source(folder / "source")
    nvcc = _INSIDE / "packages" / _program(packages, "nvcc").relative_to(packages)
    cmake = _INSIDE / "packages" / "cmake" / "data" / "bin" / "cmake"
    source, build = _INSIDE / "work" / "source", _INSIDE / "work" / "build"
    chosen = (f"-DTRIVET_NVCC={nvcc}", f"-DPython_EXECUTABLE={sys.executable}")
    _run_at_fixed_paths(folder, packages, [cmake, "-S", source, "-B", build, *_CMAKE_OPTIONS, *chosen])
    jobs = str(os.cpu_count() or 1)
    _run_at_fixed_paths(folder, packages, [cmake, "--build", build, "--parallel", jobs, "--target", "trivet_cuda"])
    refuse_native_code(folder / "build", "libtrivet_cuda")
    stripped = folder / LIBRARY  # of nvcc's temporary file names, too, which are others each time
    run(["strip", "--strip-unneeded", "-o", stripped, folder / "build" / "backends" / "cuda" / LIBRARY])
    return stripped


def refuse_native_code(folder: Path, name: str) -> None:
    """BuildError if a compiler below `folder` was told to use all that this machine's CPU has, or if nobody knows."""
    commands = [path.read_text(encoding="utf-8") for path in folder.rglob("compile_commands.json")]
    if not commands:
        raise BuildError(f"CMake left no compile_commands.json that says how {name} was compiled")
    if any("-march=native" in text for text in commands):
        raise BuildError(f"{name} was compiled with -march=native; a release binary is for every CPU of its kind")


def _run_at_fixed_paths(folder: Path, packages: Path, command: list[str | Path]) -> None:
    """Run it where `folder` is _INSIDE/work and `packages` _INSIDE/packages, in a mount namespace of its own."""
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    script: list[str | Path] = ["sh", "-euc", _ENTER, "enter", folder, packages]
    settings = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")}
    run([*unshare, *script, *command], env=settings, timeout=_COMPILE_SECONDS)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One compilation at a time in a folder of the cache."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
