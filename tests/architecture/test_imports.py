"""Who may import whom, and what a plain import must not load."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("app", "runtime", "exporters", "backends")
HEAVY = (
    "fastapi",
    "google.protobuf",
    "huggingface_hub",
    "jinja2",
    "numpy",
    "onnx",
    "onnxruntime",
    "pydantic",
    "rich",
    "starlette",
    "tokenizers",
    "uvicorn",
    "yaml",
)
FAMILIES = re.compile(r"(?i)\b(llama|mistral|qwen|gemma|smollm)")


def product_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(level, module) of every import; level 0 is absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def run_python(code: str, cwd: Path, **environment: str) -> str:
    """stdout of `python -c code` that finds trivet as the tests do."""
    path = os.pathsep.join([str(ROOT / "packaging" / "python"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_layer_contracts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "packaging" / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", done.stdout), done.stdout


@pytest.mark.parametrize("path", product_files(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_product_code_imports_itself_relatively(path: Path) -> None:
    """An absolute import would load a second copy from a checkout, and hide from go-to-definition."""
    absolute = [name for level, name in imported_modules(ast.parse(path.read_text())) if level == 0]
    own = [name for name in absolute if name.split(".")[0] in ("trivet", *PACKAGES)]
    assert not own


def test_the_contract_needs_msgspec_only() -> None:
    for path in (ROOT / "backends" / "contract").glob("*.py"):
        for level, name in imported_modules(ast.parse(path.read_text())):
            allowed = level == 1 or (level == 0 and name.split(".")[0] in {*sys.stdlib_module_names, "msgspec"})
            assert allowed, f"{path.name} imports {'.' * level}{name}"


def test_scheduler_and_kv_cache_do_no_numeric_work() -> None:
    for folder in ("scheduler", "kv_cache"):
        for path in (ROOT / "runtime" / folder).glob("*.py"):
            names = {name.split(".")[0] for level, name in imported_modules(ast.parse(path.read_text())) if level == 0}
            assert not names & {"numpy", "onnx", "onnxruntime"}, path.name


@pytest.mark.parametrize("folder", ["runner", "scheduler", "kv_cache", "engine"])
def test_the_engine_knows_no_model_family(folder: str) -> None:
    for path in (ROOT / "runtime" / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr != "family", f"{path.name}:{node.lineno}"
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                assert not FAMILIES.search(name), f"{path.name}:{node.lineno}: {name}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not FAMILIES.match(node.value), f"{path.name}:{node.lineno}: {node.value!r}"


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    code = f"import json, sys, trivet; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    assert json.loads(run_python(code, tmp_path)) == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["serve", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    code = f"""
import sys
from importlib.metadata import entry_points
sys.argv = ["trivet", *{arguments!r}]
from trivet.app.__main__ import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
assert not code, code
print("LOADED", [m for m in {HEAVY!r} if m in sys.modules])
"""
    out = run_python(code, tmp_path)
    assert out.splitlines()[-1] == "LOADED []"
    assert len(out.splitlines()) > 1


def test_a_start_imports_no_standard_module_that_it_can_do_without(tmp_path: Path) -> None:
    """Each takes some ms; libraries may import them all the same."""
    modules = {"asyncio", "concurrent.futures", "dataclasses", "difflib", "hashlib", "logging", "random", "shutil"}
    code = f"""
import json, sys, msgspec, numpy
before = {{*sys.modules}}
from trivet import LLM, SamplingParams
import trivet.exporters.stamp, trivet.runtime.model_store
print(json.dumps(sorted({modules!r} & ({{*sys.modules}} - before))))
"""
    assert json.loads(run_python(code, tmp_path)) == []


def test_public_names_resolve(tmp_path: Path) -> None:
    code = "import trivet; print([n for n in trivet.__all__ if getattr(trivet, n) is None])"
    assert run_python(code, tmp_path).strip() == "[]"
    code = "import trivet\ntry: trivet.nonsense\nexcept AttributeError as e: print(e)"
    assert "nonsense" in run_python(code, tmp_path)


def test_a_public_name_is_found_once(tmp_path: Path) -> None:
    """Each time it is looked up, what the program has made would be moved out of the sight of the cycle collector."""
    code = "import trivet; trivet.SamplingParams; print('SamplingParams' in vars(trivet))"
    assert run_python(code, tmp_path).strip() == "True"


def test_telemetry_is_off(tmp_path: Path) -> None:
    code = "import os, trivet; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    assert run_python(code, tmp_path, ORT_DISABLE_TELEMETRY="0").strip() == "1"


def test_openblas_threads_soon_sleep_unless_told_otherwise(tmp_path: Path) -> None:
    name = "OPENBLAS_THREAD_TIMEOUT"
    show = f"import trivet; print(os.environ[{name!r}])"
    assert run_python(f"import os; os.environ.pop({name!r}, None); {show}", tmp_path).strip() == "16"
    assert run_python(f"import os; {show}", tmp_path, **{name: "20"}).strip() == "20"


def test_what_is_imported_is_declared() -> None:
    """Every third-party import of the product is a dependency in pyproject.toml, and every dependency is imported.

    But for ml-dtypes, which onnx imports: it is there for a version that is left out.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w.-]", requirement)[0] for requirement in project["dependencies"]} - {"ml-dtypes"}
    names = {"pyyaml": "yaml", "protobuf": "google"}
    imported = {
        name.split(".")[0]
        for path in product_files()
        for level, name in imported_modules(ast.parse(path.read_text()))
        if level == 0
    }
    assert imported - set(sys.stdlib_module_names) == {names.get(name, name) for name in declared}


def test_onnxruntime_is_imported_inside_the_package_only() -> None:
    """Everything that imports onnxruntime lies below trivet/__init__.py, which turns its telemetry off first."""
    importers = [
        path.relative_to(ROOT).as_posix()
        for path in product_files()
        if any(name.split(".")[0] == "onnxruntime" for _, name in imported_modules(ast.parse(path.read_text())))
    ]
    assert importers
    assert all(path.startswith(("backends/", "app/")) for path in importers), importers


def test_nothing_top_level_but_trivet(tmp_path: Path) -> None:
    code = "import importlib.util as u; print([n for n in ('app','runtime','backends','exporters') if u.find_spec(n)])"
    assert run_python(code, tmp_path).strip() == "[]"


def test_pypi_packaging_is_not_shadowed(tmp_path: Path) -> None:
    assert not (ROOT / "packaging" / "__init__.py").exists()
    assert "site-packages" in run_python("import packaging; print(packaging.__file__)", ROOT)


def test_link_tree_names_the_four_folders() -> None:
    tree = ROOT / "packaging" / "python" / "trivet"
    links = {path.name: path.resolve() for path in tree.iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in PACKAGES}
