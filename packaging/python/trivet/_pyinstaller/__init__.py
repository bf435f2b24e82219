"""Tells PyInstaller where the hook of this package lies, so that programs which import trivet can be frozen."""

from __future__ import annotations

import os


def get_hook_dirs() -> list[str]:
    """Folders with hooks; PyInstaller finds this function through the entry point `pyinstaller40`."""
    return [os.path.dirname(__file__)]
