"""The environment that is frozen: one virtual environment with exactly the pinned packages and the wheel of trivet."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .audit import REFUSED_LIBRARIES
from .cuda import CudaLibrary, refuse_native_code
from .errors import BuildError
from .process import run
from .root import cache_folder, inside, make_whole
from .source import ROOT, copy_source
from .system import PYTHON, System

PINS = ROOT / "packaging" / "pyinstaller"
# The system's Python: one from pyenv leaves its RUNPATH in every extension module.
DEFAULT_PYTHON = Path("/usr/bin/python3")
# CMake settings of each tuple's back end; what a machine happens to have installed decides nothing.
BACK_ENDS: Mapping[str, tuple[str, ...]] = {"cpu": ("TRIVET_CUDA=OFF",), "cuda": ("TRIVET_CUDA=ON",)}
_BUILD_CONSTRAINTS = PINS / "build-constraints.txt"
_BOOTLOADER = {"PYINSTALLER_COMPILE_BOOTLOADER": "1", "PYINSTALLER_BOOTLOADER_WAF_ARGS": "--static-zlib"}
# One path for every CPU and one with AVX2: the kernels are not numpy's, and each further path costs minutes and size.
_NUMPY_OPTIONS = ("-Dallow-noblas=true", "-Dblas=none", "-Dlapack=none", "-Dcpu-baseline=none", "-Dcpu-dispatch=X86_V3")


@dataclass(frozen=True, slots=True)
class Environment:
    system: System
    python: Path  # of the virtual environment
    site_packages: Path
    base_prefix: Path
    python_version: str
    distributions: Mapping[str, str]  # name -> version of all that is installed
    cpu_baseline: str  # least CPU that every part runs on
    cpu_baseline_reason: str
    cuda: CudaLibrary | None = None  # what the wheel of trivet holds beside the CPU library


def make_environment(
    work: Path,
    *,
    recipe: str,
    wheel: Path | None,
    base_python: Path,
    epoch: int,
    system: System,
    cuda: CudaLibrary | None = None,
) -> Environment:
    """Create it as work/venv. `wheel` None = build trivet's wheel from a copy of the tree, with the CUDA library."""
    python = work / "venv" / "bin" / "python"
    base = PYTHON if system.is_foreign else base_python
    system.run([base, "-m", "venv", "--without-pip", work / "venv"], [work])
    pip, install = _pip(system, python)
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    if inside():  # whose pip is new enough for it
        environment |= {"PIP_BUILD_CONSTRAINT": str(_BUILD_CONSTRAINTS)}
    run([*install, "--require-hashes", "--only-binary", ":all:", "-r", PINS / "requirements.txt"], env=environment)
    run([*install, _compiled(pip, "pyinstaller", [], environment | _BOOTLOADER, _cross_bootloader(system))])
    if recipe == "release":
        options = [f'--config-settings="setup-args={option}"' for option in _NUMPY_OPTIONS]
        run([*install, "--force-reinstall", _compiled(pip, "numpy", options, environment)])
        _forget_build_path(python)
    run([*install, wheel if wheel is not None else _trivet_wheel(work, pip, environment, system, cuda)])
    return replace(_describe(work, python, recipe, system), cuda=cuda)


def _pip(system: System, python: Path) -> tuple[list[str | Path], list[str | Path]]:
    """The words of a pip that builds wheels, and of one that installs them where `python` finds them.

    pip always runs on this machine's Python; for a foreign system it takes the wheels that fit there.
    """
    flags = ["-q", "--no-compile", "--no-deps", "--disable-pip-version-check"]
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", sys.executable if system.is_foreign else python]
    if not system.is_foreign:
        return pip, [*pip, "install", *flags]
    (folder,) = (python.parent.parent / "lib").glob("python3*/site-packages")
    where: list[str | Path] = ["--target", folder, "--python-version", folder.parent.name.removeprefix("python")]
    tags = (f"linux_{system.architecture.name}", *system.architecture.wheel_platforms)
    return pip, [*pip, "install", *flags, *where, *(f"--platform={tag}" for tag in tags)]


def _cross_bootloader(system: System) -> dict[str, str]:
    """What makes PyInstaller's build compile its bootloader for a foreign system."""
    if not system.is_foreign:
        return {}
    architecture = system.architecture
    family = "arm" if architecture.name == "aarch64" else "intel"
    tag = f"linux_{architecture.name}"
    return {"CC": architecture.tool("gcc"), "PYI_PLATFORM": f"Linux-64bit-{family}", "PYI_WHEEL_TAG": tag}


def _describe(work: Path, python: Path, recipe: str, system: System) -> Environment:
    question = (
        "import json, platform, sys, sysconfig\n"
        "print(json.dumps([sysconfig.get_path('purelib'), sys.base_prefix, platform.python_version()]))"
    )
    site_packages, base_prefix, version = json.loads(system.run([python, "-c", question], [work]))
    found = importlib.metadata.distributions(path=[site_packages])
    if recipe == "release":
        why = "numpy is compiled without a baseline; onnxruntime and tokenizers choose at run time"
        cpu_baseline = ("x86-64", why)
    else:
        cpu_baseline = system.architecture.wheel_baseline
    return Environment(
        system=system,
        python=python,
        site_packages=Path(site_packages),
        base_prefix=Path(base_prefix),
        python_version=version,
        distributions={item.name: item.version for item in sorted(found, key=lambda item: item.name.lower())},
        cpu_baseline=cpu_baseline[0],
        cpu_baseline_reason=cpu_baseline[1],
    )


def _compiled(
    pip: list[str | Path],
    name: str,
    options: list[str],
    environment: Mapping[str, str],
    cross: Mapping[str, str] | None = None,
) -> Path:
    """The wheel of a pinned source distribution, from the cache or compiled now.

    `options` stand on the line of the requirement: pip ignores those of its command line for a requirement of a file.
    `cross`: what else of the environment makes it compile for another architecture.
    """
    cross = cross or {}
    (pin,) = [
        line for line in (PINS / "requirements-built.txt").read_text().splitlines() if line.startswith(f"{name}==")
    ]
    compiler = run([cross.get("CC", "c++"), "--version"]).splitlines()[0]
    python = run([pip[-1], "-VV"])
    facts = inside()
    system = f"{facts['recipe_sha256']} {_BUILD_CONSTRAINTS.read_text()}" if facts is not None else ""
    settings = [f"{key}={value}" for key, value in (*_BOOTLOADER.items(), *cross.items())]
    inputs = "\n".join([pin, *options, compiler, python, system, *settings])
    folder = cache_folder() / f"{name}-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}"
    if not any(folder.glob("*.whl")):
        wheel = [*pip, "wheel", "-q", "--no-deps", "--no-cache-dir", "--no-binary", name, "--require-hashes"]

        def compile_in(making: Path) -> None:
            making.mkdir()
            (making / "pin.txt").write_text(f"{' '.join([pin, *options])}\n", encoding="ascii")
            run([*wheel, "-r", making / "pin.txt", "-w", making], env={**environment, **cross}, timeout=7200)

        make_whole(folder, compile_in)
    (found,) = folder.glob("*.whl")
    return found


def _forget_build_path(python: Path) -> None:
    """Take the path of the compiling interpreter out of numpy.__config__, where numpy's build leaves it."""
    (config,) = (python.parent.parent / "lib").glob("python3*/site-packages/numpy/__config__.py")
    text, count = re.subn(r'("path": )r"/[^"]*"', r'\1r"python3"', config.read_text(encoding="utf-8"))
    if count != 1:
        raise BuildError(f"{config} names {count} paths of an interpreter, expected 1")
    config.write_text(text, encoding="utf-8")


def refuse_drivers(tree: Path) -> None:
    """BuildError for a driver in the tree that is built; a stub to link against belongs outside of it."""
    libraries = (path for path in tree.rglob("*.so*") if REFUSED_LIBRARIES.match(path.name))
    if found := sorted(path.relative_to(tree).as_posix() for path in libraries):
        raise BuildError(f"never bundled, yet in the tree that is built: {', '.join(found)}")


def _trivet_wheel(
    work: Path,
    pip: list[str | Path],
    environment: Mapping[str, str],
    system: System,
    cuda: CudaLibrary | None = None,
) -> Path:
    copy_source(work / "source")
    refuse_drivers(work / "source")
    back_ends = BACK_ENDS["cpu"] if cuda is None else (*BACK_ENDS["cuda"], f"TRIVET_CUDA_LIBRARY={cuda.path}")
    settings = [f"cmake.define.{setting}" for setting in back_ends]
    if system.is_foreign:
        toolchain = work / "source" / "cmake" / f"{system.architecture.triplet}.cmake"
        settings += [
            f"cmake.define.CMAKE_TOOLCHAIN_FILE={toolchain}",
            f"wheel.tags=py3-none-linux_{system.architecture.name}",
        ]
    explicit = [f"--config-settings={setting}" for setting in settings]
    run([*pip, "wheel", "-q", "--no-deps", *explicit, "-w", work / "wheel", work / "source"], env=environment)
    refuse_native_code(work / "source", "the op library")
    (found,) = (work / "wheel").glob("trivet-*.whl")
    return found
