"""The audit of the built library: it notices a missing SM, a source that is too wide, and PTX."""

from __future__ import annotations

import json
import shutil
import site
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import made_up_bundle  # noqa: F401  (makes `release` importable)
import pytest

from release import cubins

KERNEL = """
namespace { __global__ void twice(float* x) { x[threadIdx.x] *= 2; } }
extern "C" void run(float* x) { twice<<<1, 32>>>(x); }
"""
DECLARED = {"architectures": ["80", "90a"], "sources": {"scale": "all", "fast": ["90a"]}}


def find_cuobjdump() -> str | None:
    """On the PATH, or in the folder where the PyPI package puts it."""
    if found := shutil.which("cuobjdump"):
        return found
    folders = (*site.getsitepackages(), site.getusersitepackages())
    return next((str(path) for folder in folders for path in sorted(Path(folder).glob("nvidia/*/bin/cuobjdump"))), None)


def gencode(sm: str) -> str:
    return f"-gencode=arch=compute_{sm},code=sm_{sm}"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, list[str]]], Path]:
    """Makes a library of one kernel per source, compiled with the given options; libraries share objects."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")

    @cache
    def compiled(name: str, options: tuple[str, ...]) -> str:
        folder = tmp_path_factory.mktemp(name)
        source = folder / f"{name}.cu"
        source.write_text(KERNEL.replace("run", f"run_{name}"))
        command = [nvcc, *options, "-Xcompiler=-fPIC", "-c", str(source), "-o", str(folder / f"{name}.o")]
        subprocess.run(command, check=True, capture_output=True)
        return str(folder / f"{name}.o")

    def make(sources: dict[str, list[str]]) -> Path:
        library = tmp_path_factory.mktemp("library") / "lib.so"
        objects = [compiled(name, tuple(options)) for name, options in sources.items()]
        subprocess.run(["g++", "-shared", "-o", str(library), *objects], check=True, capture_output=True)
        return library

    return make


GOOD = {"scale": [gencode("80"), gencode("90a")], "fast": [gencode("90a")]}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (GOOD, []),
        (GOOD | {"scale": [gencode("80")]}, ["scale.cu: no code for SM 90a"]),
        (
            GOOD | {"fast": [gencode("80"), gencode("90a")]},
            ["fast.cu: code for SM 80, for which it is not declared"],
        ),
        ({"scale": GOOD["scale"]}, ["fast.cu: no code for SM 90a"]),
        (GOOD | {"other": [gencode("80")]}, ["other.cu: not declared, built for SM 80"]),
        (
            GOOD | {"scale": [gencode("90a"), "-gencode=arch=compute_80,code=compute_80"]},
            ["scale.cu: no code for SM 80", "PTX is embedded: 80"],
        ),
    ],
    ids=["as_declared", "missing_sm", "too_wide", "missing_source", "unknown_source", "ptx"],
)
def test_audit_of_a_library(
    build: Callable[[dict[str, list[str]]], Path],
    tmp_path: Path,
    sources: dict[str, list[str]],
    expected: list[str],
) -> None:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("cuobjdump is not installed (CUDA, or the package nvidia-cuda-cuobjdump)")
    declaration = tmp_path / "kernels.json"
    declaration.write_text(json.dumps(DECLARED))
    code = cubins.read_device_code(build(sources), cuobjdump)
    assert cubins.code_problems(code, cubins.declared_architectures(declaration)) == expected


def test_declared_sources_are_the_sources_there_are() -> None:
    declared = cubins.declared_architectures()
    assert declared.keys() == {path.stem for path in (cubins.DECLARATION.parent / "ops").glob("*.cu")}
    features = {name: sms for name, sms in declared.items() if len(sms) != 10}
    assert features == {"matmul_wgmma": {"90a"}, "matmul_wgmma_blocks": {"90a"}}
