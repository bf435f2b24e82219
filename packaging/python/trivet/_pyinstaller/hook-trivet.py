"""PyInstaller hook: what a frozen program that imports trivet must hold. Libraries and data are named one by one."""

from __future__ import annotations

import sys
from pathlib import Path

from PyInstaller.utils.hooks import collect_submodules, copy_metadata, get_package_paths

LIBRARY_SUFFIX = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")
LIBRARIES = (f"backends/cpu/libtrivet_cpu.{LIBRARY_SUFFIX}",)  # op libraries, opened by path at run time
OPTIONAL_LIBRARIES = (f"backends/cuda/libtrivet_cuda.{LIBRARY_SUFFIX}",)  # where trivet was built with them
DATA = ("runtime/model_store/catalogue.json",)

_root = Path(get_package_paths("trivet")[1])


def _collected(names: tuple[str, ...]) -> list[tuple[str, str]]:
    missing = [name for name in names if not (_root / name).is_file()]
    if missing:
        raise SystemExit(f"hook-trivet: {_root} lacks {', '.join(missing)}; the installation of trivet is incomplete")
    return [(str(_root / name), str(Path("trivet", name).parent)) for name in names]


def _is_module(name: str) -> bool:
    """Op libraries lie beside modules and look like extension modules, but are none."""
    return not name.rpartition(".")[2].startswith("libtrivet_") and "._pyinstaller" not in name


# Commands, model families and public names are imported by computed name.
hiddenimports = collect_submodules("trivet", filter=_is_module)
binaries = _collected((*LIBRARIES, *(name for name in OPTIONAL_LIBRARIES if (_root / name).is_file())))
datas = _collected(DATA)
for _package in (
    "trivet",
    "onnxruntime",
    "onnx",
    "numpy",
    "tokenizers",
    "jinja2",
    "msgspec",
    "fastapi",
    "uvicorn",
    "huggingface_hub",
):
    datas += copy_metadata(_package)  # `trivet doctor` prints versions
