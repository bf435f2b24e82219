"""The environment that is frozen: one virtual environment with exactly the pinned packages and the wheel of trivet."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .audit import REFUSED_LIBRARIES
from .errors import BuildError
from .process import run
from .root import cache_folder, inside
from .source import ROOT, copy_source

PINS = ROOT / "packaging" / "pyinstaller"
# The system's Python: one from pyenv leaves its RUNPATH in every extension module.
DEFAULT_PYTHON = Path("/usr/bin/python3")
# Back ends of a CPU bundle; what a machine happens to have installed decides nothing.
BACK_ENDS = ("TRIVET_CUDA=OFF",)
_BUILD_CONSTRAINTS = PINS / "build-constraints.txt"
_BOOTLOADER = {"PYINSTALLER_COMPILE_BOOTLOADER": "1", "PYINSTALLER_BOOTLOADER_WAF_ARGS": "--static-zlib"}
# One path for every CPU and one with AVX2: the kernels are not numpy's, and each further path costs minutes and size.
_NUMPY_OPTIONS = ("-Dallow-noblas=true", "-Dblas=none", "-Dlapack=none", "-Dcpu-baseline=none", "-Dcpu-dispatch=X86_V3")


@dataclass(frozen=True, slots=True)
class Environment:
    python: Path  # of the virtual environment
    site_packages: Path
    base_prefix: Path
    python_version: str
    distributions: Mapping[str, str]  # name -> version of all that is installed
    cpu_baseline: str  # least CPU that every part runs on
    cpu_baseline_reason: str


def make_environment(work: Path, *, recipe: str, wheel: Path | None, base_python: Path, epoch: int) -> Environment:
    """Create it as work/venv. `wheel` None = build trivet's wheel from a copy of the tree."""
    python = work / "venv" / "bin" / "python"
    run([base_python, "-m", "venv", "--without-pip", work / "venv"])
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "-q", "--no-compile", "--no-deps", "--disable-pip-version-check"]
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    if inside():  # whose pip is new enough for it
        environment |= {"PIP_BUILD_CONSTRAINT": str(_BUILD_CONSTRAINTS)}
    run([*install, "--require-hashes", "--only-binary", ":all:", "-r", PINS / "requirements.txt"], env=environment)
    run([*install, _compiled(pip, "pyinstaller", [], environment | _BOOTLOADER)])
    if recipe == "release":
        options = [f'--config-settings="setup-args={option}"' for option in _NUMPY_OPTIONS]
        run([*install, "--force-reinstall", _compiled(pip, "numpy", options, environment)])
        _forget_build_path(python)
    run([*install, wheel if wheel is not None else _trivet_wheel(work, pip, environment)])
    return _describe(python, recipe)


def _describe(python: Path, recipe: str) -> Environment:
    question = (
        "import json, platform, sys, sysconfig\n"
        "print(json.dumps([sysconfig.get_path('purelib'), sys.base_prefix, platform.python_version()]))"
    )
    site_packages, base_prefix, version = json.loads(run([python, "-c", question]))
    found = importlib.metadata.distributions(path=[site_packages])
    own_numpy = recipe == "release"
    return Environment(
        python=python,
        site_packages=Path(site_packages),
        base_prefix=Path(base_prefix),
        python_version=version,
        distributions={item.name: item.version for item in sorted(found, key=lambda item: item.name.lower())},
        cpu_baseline="x86-64" if own_numpy else "x86-64-v2",
        cpu_baseline_reason="numpy is compiled without a baseline; onnxruntime and tokenizers choose at run time"
        if own_numpy
        else "numpy's wheel is compiled for x86-64-v2; the op library itself needs SSE2",
    )


def _compiled(pip: list[str | Path], name: str, options: list[str], environment: Mapping[str, str]) -> Path:
    """The wheel of a pinned source distribution, from the cache or compiled now.

    `options` stand on the line of the requirement: pip ignores those of its command line for a requirement of a file.
    """
    (pin,) = [
        line for line in (PINS / "requirements-built.txt").read_text().splitlines() if line.startswith(f"{name}==")
    ]
    compiler = run(["c++", "--version"]).splitlines()[0]
    python = run([pip[-1], "-VV"])
    facts = inside()
    system = f"{facts['recipe_sha256']} {_BUILD_CONSTRAINTS.read_text()}" if facts is not None else ""
    inputs = "\n".join(
        [pin, *options, compiler, python, system, *(f"{key}={value}" for key, value in _BOOTLOADER.items())]
    )
    folder = cache_folder() / f"{name}-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}"
    if not any(folder.glob("*.whl")):
        if name == "pyinstaller" and not any(
            path.is_file() for path in (Path("/usr/include/zlib.h"), Path("/usr/local/include/zlib.h"))
        ):
            raise BuildError("the bootloader is compiled with zlib inside; install zlib's headers (Debian: zlib1g-dev)")
        making = folder.with_name(f"{folder.name}.{os.getpid()}")
        making.mkdir(parents=True)
        (making / "pin.txt").write_text(f"{' '.join([pin, *options])}\n", encoding="ascii")
        wheel = [*pip, "wheel", "-q", "--no-deps", "--no-cache-dir", "--no-binary", name, "--require-hashes"]
        run([*wheel, "-r", making / "pin.txt", "-w", making], env=environment, timeout=7200)
        if folder.exists():  # another build was faster
            shutil.rmtree(making)
        else:
            making.rename(folder)
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


def _trivet_wheel(work: Path, pip: list[str | Path], environment: Mapping[str, str]) -> Path:
    copy_source(work / "source")
    refuse_drivers(work / "source")
    explicit = [f"--config-settings=cmake.define.{setting}" for setting in BACK_ENDS]
    run([*pip, "wheel", "-q", "--no-deps", *explicit, "-w", work / "wheel", work / "source"], env=environment)
    for commands in (work / "source").rglob("compile_commands.json"):
        if "-march=native" in commands.read_text(encoding="utf-8"):
            raise BuildError(
                "the op library was compiled with -march=native; a release binary is for every CPU of its kind"
            )
    (found,) = (work / "wheel").glob("trivet-*.whl")
    return found
