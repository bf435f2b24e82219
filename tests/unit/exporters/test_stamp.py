"""Stamps: an entry that nothing has touched is found without a look at the weights, any other one is not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trivet.backends.contract.manifest import GRAPH_NAME, MANIFEST_NAME, TOKENIZER_NAME
from trivet.exporters import export, package, pipeline, stamp

Tiny = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp, "_SETTLED_NS", 0)


def plain(path: Path, cache: Path, **options: Any) -> Path:
    return export(path, cache_dir=cache, **{"verify": False, **options})


def stamped(path: Path, cache: Path, **options: Any) -> Path:
    """Made, and compared by content once."""
    plain(path, cache, **options)
    return plain(path, cache, **options)


def is_found(path: Path, cache: Path, *, verify: bool = False, tokenizer_pre: str | None = None) -> bool:
    return stamp.find_stamped(cache, path, verify=verify, tokenizer_pre=tokenizer_pre) is not None


def test_a_stamped_entry_needs_no_digest(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plain(checkpoint, cache)
    assert not is_found(checkpoint, cache)
    assert plain(checkpoint, cache) == folder and is_found(checkpoint, cache)
    for module in (pipeline, package):
        monkeypatch.setattr(module, "source_of", None)
    assert plain(checkpoint, cache) == folder


def test_a_fresh_file_gets_no_stamp(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp, "_SETTLED_NS", 10**15)
    stamped(checkpoint, cache)
    assert not is_found(checkpoint, cache)


@pytest.mark.parametrize("name", ["my model.gguf", GRAPH_NAME, TOKENIZER_NAME, MANIFEST_NAME])
def test_a_write_with_the_old_times_is_seen(name: str, checkpoint: Path, cache: Path) -> None:
    folder = stamped(checkpoint, cache)
    path = checkpoint if name == checkpoint.name else folder / name
    before = path.stat()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not is_found(checkpoint, cache)


def test_a_file_put_in_place_of_another_is_seen(checkpoint: Path, cache: Path) -> None:
    stamped(checkpoint, cache)
    other = Path(shutil.copy2(checkpoint, checkpoint.with_suffix(".new")))
    other.replace(checkpoint)
    assert not is_found(checkpoint, cache)


def test_the_question_must_be_the_same(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamped(checkpoint, cache)
    assert not is_found(checkpoint, cache, verify=True)
    assert not is_found(checkpoint, cache, tokenizer_pre="gpt-2")
    assert not is_found(Path(shutil.copy2(checkpoint, checkpoint.parent.parent / checkpoint.name)), cache)
    stamped(checkpoint, cache, verify=True)
    assert is_found(checkpoint, cache, verify=True) and is_found(checkpoint, cache)
    monkeypatch.setattr(stamp, "EXPORTER_VERSION", 999)
    assert not is_found(checkpoint, cache)


def test_files_of_a_directory_that_change_or_come(tiny: Tiny, tmp_path: Path, cache: Path) -> None:
    directory = Path(shutil.copytree(tiny("llama", "safetensors"), tmp_path / "model"))
    for name in ("config.json", "generation_config.json", "more.safetensors"):
        stamped(directory, cache)
        assert is_found(directory, cache)
        with (directory / name).open("a") as file:
            file.write("{}" if not file.tell() else "\n")
        assert not is_found(directory, cache)


@pytest.mark.parametrize("text", ["", "[]", '{"question": 1}'])
def test_a_damaged_stamp_is_no_stamp(text: str, checkpoint: Path, cache: Path) -> None:
    folder = stamped(checkpoint, cache)
    (folder / stamp.STAMP_NAME).write_text(text)
    assert plain(checkpoint, cache) == folder and is_found(checkpoint, cache)


@pytest.mark.parametrize("kind", ["gguf-q8_0", "safetensors"])
def test_an_incomplete_stamp_is_no_stamp(kind: str, tiny: Tiny, tmp_path: Path, cache: Path) -> None:
    """Each file that an entry depends on must be in it; nothing changes here but the stamp."""
    source = tiny("llama", kind)
    copy = shutil.copytree if source.is_dir() else shutil.copy2
    checkpoint = Path(copy(source, tmp_path / f"model{source.suffix}"))
    path = stamped(checkpoint, cache) / stamp.STAMP_NAME
    whole = json.loads(path.read_text())
    assert is_found(checkpoint, cache)
    incomplete: list[Any] = [{}, []]
    incomplete += [{name: whole["files"][name] for name in whole["files"] if name != left} for left in whole["files"]]
    for files in incomplete:
        path.write_text(json.dumps(whole | {"files": files}))
        assert not is_found(checkpoint, cache), files
    assert plain(checkpoint, cache) == path.parent and is_found(checkpoint, cache)
