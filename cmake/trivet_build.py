"""Build backend: scikit-build-core, plus an npm when the ONNX Runtime headers have to be fetched with one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ort_headers
from scikit_build_core import build as _backend
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _npm_requirement() -> list[str]:
    """A throw-away build requirement that brings npm, only where the headers are not here and npm is not either."""
    try:
        needed = ort_headers.find_local() is None and shutil.which("npm") is None
    except (ort_headers.HeadersError, OSError):
        return []  # CMake will say what is wrong
    return [ort_headers.NPM_PROVIDER] if needed else []


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """scikit-build-core's, in a throw-away build folder when the source tree (or its build folder) is read-only."""
    settings = dict(config_settings or {})
    usual = Path("build") if Path("build").exists() else Path()
    if os.access(usual, os.W_OK) or {"build-dir", "skbuild.build-dir"} & settings.keys():
        return str(_backend.build_wheel(wheel_directory, settings, metadata_directory))
    with tempfile.TemporaryDirectory(prefix="trivet-build-") as folder:
        return str(_backend.build_wheel(wheel_directory, settings | {"build-dir": folder}, metadata_directory))


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_backend.get_requires_for_build_wheel(config_settings), *_npm_requirement()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_backend.get_requires_for_build_editable(config_settings), *_npm_requirement()]
