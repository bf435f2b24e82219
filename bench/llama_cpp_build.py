"""llama.cpp as the source package of llama-cpp-python carries it: one native build, and the Python package on top."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

VERSION = "0.3.36"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    # Where the C++ library is linked statically, its streams crash once libllama takes those of libggml.
    "-DCMAKE_SHARED_LINKER_FLAGS=-Wl,--exclude-libs,ALL",
)  # fmt: skip
_TOOLS = ("llama-server", "llama-bench", "llama-quantize")
_NEEDED = (  # of vendor/llama.cpp, to build the library alone
    "CMakeLists.txt", "LICENSE", "cmake", "include", "src", "vendor", "ggml/CMakeLists.txt", "ggml/cmake",
    "ggml/include",
)  # fmt: skip
_NEEDED_OF_GGML = ("ggml-cpu",)  # the folders of ggml/src; other back ends stay behind

Run = Callable[[list[str | Path]], None]  # runs a command, raises when it fails


def build(source: Path, folder: Path, run: Run, *, tools: bool) -> Path:
    """The folder of libllama, for this CPU, and with `tools` of llama-server, llama-bench and llama-quantize."""
    wanted = "ON" if tools else "OFF"
    options = [*_OPTIONS, *(f"-DLLAMA_BUILD_{part}={wanted}" for part in ("COMMON", "TOOLS", "SERVER"))]
    run(["cmake", "-S", source / "vendor" / "llama.cpp", "-B", folder, *options])
    jobs = str(len(os.sched_getaffinity(0)))
    run(["cmake", "--build", folder, "-j", jobs, "--target", "llama", *(_TOOLS if tools else ())])
    return folder / "bin"


def install_package(python: Path, source: Path, libraries: Path) -> None:
    """Put the package llama_cpp into an environment, over libraries that are built already."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    package = Path(done.stdout.strip()) / "llama_cpp"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(source / "llama_cpp", package)
    (package / "lib").symlink_to(libraries.resolve(), target_is_directory=True)


def copy_needed(source: Path, target: Path) -> None:
    """The part of the source package that `build` without tools and install_package need: a tenth of it."""
    shutil.copytree(source / "llama_cpp", target / "llama_cpp")
    tree, kept = source / "vendor" / "llama.cpp", target / "vendor" / "llama.cpp"
    for name in _NEEDED:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, kept / name)
        elif (tree / name).exists():
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, kept / name)
    sources = tree / "ggml" / "src"
    others = [path.name for path in sources.iterdir() if path.is_dir() and path.name not in _NEEDED_OF_GGML]
    shutil.copytree(sources, kept / "ggml" / "src", ignore=lambda folder, _: others if folder == str(sources) else [])
