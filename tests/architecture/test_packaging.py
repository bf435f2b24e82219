"""The scripts that guard the wheel and the bill of materials, and the search for ONNX Runtime's headers."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "trivet-0.1.0-py3-none-linux_x86_64.whl"
DIST_INFO = "trivet-0.1.0.dist-info"


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def make_wheel(folder: Path, *, leave_out: str = "", add: str = "", name: str = NAME) -> Path:
    """A wheel of empty files with the expected names, but for one."""
    code = f"import check_wheel; print('\\n'.join(sorted(check_wheel.expected_files({DIST_INFO!r}))))"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=ROOT / "packaging", capture_output=True, text=True, check=True
    )
    names = done.stdout.split()
    assert "trivet/runtime/outputs.py" in names
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for file in [*(n for n in names if n != leave_out), *([add] if add else [])]:
            archive.writestr(file, "Version: 0.1.0\n" if file.endswith("METADATA") else "")
    return path


def check_wheel(wheel: Path) -> subprocess.CompletedProcess[str]:
    return run(ROOT / "packaging" / "check_wheel.py", str(wheel))


def test_a_good_wheel_passes(tmp_path: Path) -> None:
    done = check_wheel(make_wheel(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "extra", ["tests/conftest.py", "runtime/llm.py", "trivet/backends/cpu/register.cc", "trivet/notes.md"]
)
def test_a_stray_file_is_named(tmp_path: Path, extra: str) -> None:
    done = check_wheel(make_wheel(tmp_path, add=extra))
    assert done.returncode == 1
    assert f"not expected: {extra}" in done.stderr


@pytest.mark.parametrize(
    "lost", ["trivet/backends/cpu/libtrivet_cpu.so", "trivet/py.typed", f"{DIST_INFO}/sboms/trivet.cdx.json"]
)
def test_a_lost_file_is_named(tmp_path: Path, lost: str) -> None:
    done = check_wheel(make_wheel(tmp_path, leave_out=lost))
    assert done.returncode == 1
    assert f"missing: {lost}" in done.stderr


def test_a_wheel_for_any_platform_is_refused(tmp_path: Path) -> None:
    done = check_wheel(make_wheel(tmp_path, name="trivet-0.1.0-py3-none-any.whl"))
    assert done.returncode == 1
    assert "PLATFORM" in done.stderr


def test_bill_of_materials_is_up_to_date() -> None:
    done = run(ROOT / "sbom" / "check.py")
    assert done.returncode == 0, done.stderr


# --- cmake/ort_headers.py ------------------------------------------------------------------------------------------
def find_headers(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a world without npm and without a cache."""
    isolated = {"PATH": str(tmp_path), "TRIVET_HOME": str(tmp_path / "home"), "ORT_INCLUDE_DIR": ""}
    return run(ROOT / "cmake" / "ort_headers.py", **isolated, **environment)


def header(folder: Path, version: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "onnxruntime_c_api.h").write_text(f"// C API\n#define ORT_API_VERSION {version}\n")
    return folder


def test_the_environment_variable_comes_first(tmp_path: Path) -> None:
    folder = header(tmp_path / "include", 27)
    done = run(ROOT / "cmake" / "ort_headers.py", ORT_INCLUDE_DIR=str(folder))
    assert (done.returncode, done.stdout.strip()) == (0, str(folder))


def test_headers_that_are_too_old_are_refused(tmp_path: Path) -> None:
    done = run(ROOT / "cmake" / "ort_headers.py", ORT_INCLUDE_DIR=str(header(tmp_path / "include", 26)))
    assert done.returncode == 1
    assert "ORT_API_VERSION 26, at least 27" in done.stderr


def test_no_headers_names_all_three_ways(tmp_path: Path) -> None:
    code = "import ort_headers as o; o.SYSTEM_DIRS = (); raise SystemExit(o.main())"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        cwd=ROOT / "cmake",
        env={"PATH": str(tmp_path), "TRIVET_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    for way in ("ORT_INCLUDE_DIR", "libonnxruntime-dev", "npm fetch"):
        assert way in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_cache_is_not_used(tmp_path: Path) -> None:
    code = "import ort_headers as o; print(o.cache_dir())"
    environment = {**os.environ, "TRIVET_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        cwd=ROOT / "cmake",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    header(Path(done.stdout.strip()), 29)
    code = "import ort_headers as o; print(o.from_cache())"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        cwd=ROOT / "cmake",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "None"


def test_a_read_only_source_tree_builds_elsewhere(tmp_path: Path) -> None:
    """With `build_wheel` of scikit-build-core replaced by one that prints its settings."""
    pytest.importorskip("scikit_build_core")
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import trivet_build as b\n"
        "b._backend.build_wheel = lambda wheels, settings, metadata: print(settings)\n"
        "b.build_wheel('w'); b.build_wheel('w', {'build-dir': 'mine'})\n"
        "os.access = lambda path, mode: False\n"
        "b.build_wheel('w'); b.build_wheel('w', {'build-dir': 'mine'})\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(ROOT / "cmake")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    usual, *chosen = done.stdout.splitlines()
    assert usual == "{}" and chosen[0] == chosen[2] == "{'build-dir': 'mine'}"
    assert "trivet-build-" in chosen[1] and not list(tmp_path.iterdir())
