"""What must not be in the repository, and how large a file or a function may grow."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_CPP_FILE_LINES = 400, 50, 500
LARGE_FILES: dict[str, str] = {}  # path -> why it may be longer
LARGE_FUNCTIONS: dict[str, str] = {}  # path::function -> why it may be longer
REGISTRY_HOSTS = [
    re.escape(".".join(parts))
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("nuget", "org"),
        ("crates", "io"),
        ("anaconda", "org"),
        ("debian", "org"),
    )
]
MACHINE_PATHS = [rf"(?<![\w./~$}}])/{name}/" for name in ("work", "root", "home/" + r"\w+")]
# Path -> why it may name such paths.
MAY_NAME_PATHS = {"release/known_paths.json": "lists what third-party binaries carry, for the release gate to compare"}
FORBIDDEN = re.compile("|".join(REGISTRY_HOSTS + MACHINE_PATHS))


def repository_files() -> list[Path]:
    """Files of the checkout that git does not ignore."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]


def test_no_registry_hosts_and_no_paths_of_a_machine() -> None:
    found = []
    for path in repository_files():
        if path.relative_to(ROOT).as_posix() in MAY_NAME_PATHS:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for match in FORBIDDEN.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]}")
    assert not found, "\n".join(found)


def test_no_headers_binaries_or_large_files() -> None:
    found = []
    for path in repository_files():
        if path.name.startswith("onnxruntime_") or path.suffix in {".so", ".whl", ".onnx", ".gguf", ".safetensors"}:
            found.append(str(path.relative_to(ROOT)))
        elif path.stat().st_size > 512 << 10:
            found.append(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    assert not found, "\n".join(found)


def product_python() -> list[Path]:
    folders = ("app", "runtime", "exporters", "backends")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_files_stay_small() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in product_python()}
    too_long = {name: n for name, n in sizes.items() if n > MAX_FILE_LINES and name not in LARGE_FILES}
    assert not too_long
    assert not [name for name in LARGE_FILES if sizes.get(name, 0) <= MAX_FILE_LINES], "no longer needed"


def test_cpp_files_stay_small() -> None:
    sources = [p for suffix in ("cc", "h", "inl") for p in (ROOT / "backends").rglob(f"*.{suffix}")]
    sizes = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in sources}
    assert sizes
    assert not {name: n for name, n in sizes.items() if n > MAX_CPP_FILE_LINES and name not in LARGE_FILES}


def test_functions_stay_small() -> None:
    too_long = {}
    for path in product_python():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES and name not in LARGE_FUNCTIONS:
                    too_long[name] = lines
    assert not too_long
