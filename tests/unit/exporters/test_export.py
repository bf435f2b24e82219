"""export(): whole packages through the public door, the cache, the proof, and what goes wrong on disks."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from trivet.backends.contract.manifest import GRAPH_NAME, MANIFEST_NAME, TOKENIZER_NAME, read_manifest
from trivet.exporters import export, package, package_folder, pipeline
from trivet.exporters.checkpoint import Checkpoint, open_checkpoint
from trivet.exporters.errors import CheckpointError, ExportError, PackageError

Tiny = Callable[[str, str], Path]


def plain(path: Path, cache: Path, **options: Any) -> Path:
    return export(path, cache_dir=cache, verify=False, **options)


def test_the_manifest_describes_the_model(checkpoint: Path, cache: Path) -> None:
    folder = plain(checkpoint, cache)
    manifest = read_manifest(folder)
    assert folder.name.startswith("my-model-")
    assert manifest.source_dir == str(checkpoint.parent)
    assert [(s.name, s.size_bytes, s.mtime_ns) for s in manifest.sources] == [
        ("my model.gguf", checkpoint.stat().st_size, checkpoint.stat().st_mtime_ns)
    ]
    architecture = manifest.architecture
    assert (architecture.family, architecture.name, architecture.dtype) == ("llama", "tiny llama", "quantized")
    assert architecture.weight_formats == {"f32": 7, "q8_0": 23}
    assert [(s.layer, s.num_kv_heads, s.head_dim, s.kv_offset, s.sliding_window) for s in manifest.kv_cache] == [
        (0, 2, 16, 0, 0),
        (1, 2, 16, 64, 0),
        (2, 2, 16, 128, 0),
    ]
    assert manifest.kv_elements_per_token == 192
    assert not manifest.verification.performed
    assert manifest.tokenizer.eos_token_ids
    assert set(manifest.extra["files"]) >= {GRAPH_NAME, TOKENIZER_NAME}
    onnx.load(str(folder / GRAPH_NAME), load_external_data=False)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("safetensors", "float32"), ("safetensors-bf16", "bfloat16"), ("gguf-f16", "float16"), ("gguf-q4_1", "quantized")],
)
def test_dtype_of_a_checkpoint(kind: str, dtype: str, tiny: Tiny, cache: Path) -> None:
    assert read_manifest(plain(tiny("llama", kind), cache)).architecture.dtype == dtype


def test_generation_defaults(tiny: Tiny, tmp_path: Path, cache: Path) -> None:
    directory = Path(shutil.copytree(tiny("llama", "safetensors"), tmp_path / "model"))
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 99, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    generation = read_manifest(plain(directory, cache)).generation
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.6, 20, 0.95)
    assert (generation.max_new_tokens, generation.min_p, generation.repetition_penalty) == (99, None, None)
    (directory / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ExportError, match=r"generation_config.json: top_p is 7, expected a number from 1e-09 to 1"):
        plain(directory, cache)


# --- the cache -----------------------------------------------------------------------------------------------------
def stamp(folder: Path) -> int:
    return (folder / GRAPH_NAME).stat().st_ino


def test_the_second_export_reuses_the_first(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plain(checkpoint, cache)
    monkeypatch.setattr(pipeline, "open_checkpoint", None)  # not even opened
    assert plain(checkpoint, cache) == first


def test_a_touched_file_is_recognised_by_its_content(checkpoint: Path, cache: Path) -> None:
    first = plain(checkpoint, cache)
    inode = stamp(first)
    os.utime(checkpoint, (1, 1))
    assert plain(checkpoint, cache) == first
    assert stamp(first) == inode
    assert read_manifest(first).sources[0].mtime_ns == 10**9
    package.check_sources(read_manifest(first))


def test_a_file_that_is_still_being_written_is_refused(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: Path) -> Checkpoint:
        os.utime(path, (1, 1))
        return open_checkpoint(path)

    monkeypatch.setattr(pipeline, "open_checkpoint", late)
    with pytest.raises(PackageError, match=r"my model.gguf: the file changed during the export; try again"):
        plain(checkpoint, cache)
    assert not list(cache.glob("*"))


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_replaced_during_the_export_is_named(
    verify: bool, checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(model: onnx.ModelProto, folder: Path) -> None:
        package_folder.write_graph(model, folder)
        other = checkpoint.with_suffix(".new")
        other.write_bytes(b"\xff" * checkpoint.stat().st_size)  # every weight a NaN
        other.replace(checkpoint)

    monkeypatch.setattr(pipeline, "write_graph", replaced)
    with pytest.raises(PackageError, match=r"my model.gguf: the file changed during the export; try again"):
        export(checkpoint, cache_dir=cache, verify=verify)
    assert list(cache.iterdir()) == []


def test_changed_content_gets_another_entry(checkpoint: Path, cache: Path) -> None:
    first = plain(checkpoint, cache)
    manifest = read_manifest(first)
    data = bytearray(checkpoint.read_bytes())
    data[-1] ^= 1
    checkpoint.write_bytes(data)
    with pytest.raises(PackageError, match=r"my model.gguf: the checkpoint file has changed since the export"):
        package.check_sources(manifest)
    assert plain(checkpoint, cache) != first


def test_a_moved_file_gets_an_entry_that_points_to_it(checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    first = plain(checkpoint, cache)
    (tmp_path / "new").mkdir()
    moved = checkpoint.rename(tmp_path / "new" / checkpoint.name)
    with pytest.raises(PackageError, match=r"cannot be read \(No such file or directory\): put it back"):
        package.check_sources(read_manifest(first))
    assert read_manifest(plain(moved, cache)).source_dir == str(moved.parent)


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "manifest", "garbage", "empty"])
def test_damaged_entries_are_made_again(damage: str, checkpoint: Path, cache: Path) -> None:
    folder = plain(checkpoint, cache)
    good = (folder / GRAPH_NAME).read_bytes()
    if damage == "cut":
        (folder / GRAPH_NAME).write_bytes(good[:-10])
    if damage == "flip":
        (folder / GRAPH_NAME).write_bytes(bytes([good[0] ^ 1]) + good[1:])
    if damage == "remove":
        (folder / TOKENIZER_NAME).unlink()
    if damage == "manifest":
        (folder / MANIFEST_NAME).unlink()
    if damage == "garbage":
        (folder / MANIFEST_NAME).write_text("[1, 2")
    if damage == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    assert plain(checkpoint, cache) == folder
    assert (folder / GRAPH_NAME).read_bytes() == good
    assert read_manifest(folder)
    assert [p.name for p in cache.iterdir()] == [folder.name], "nothing temporary is left"


def test_an_unproved_entry_is_made_again_when_a_proof_is_wanted(checkpoint: Path, cache: Path) -> None:
    folder = plain(checkpoint, cache)
    assert export(checkpoint, cache_dir=cache) == folder
    assert read_manifest(folder).verification.performed
    inode = stamp(folder)
    assert plain(checkpoint, cache) == folder
    assert stamp(folder) == inode


def test_a_failed_export_leaves_nothing(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "_write_tokenizer", fail)
    with pytest.raises(KeyboardInterrupt):
        plain(checkpoint, cache)
    assert list(cache.iterdir()) == []


def test_concurrent_exports_end_in_one_whole_entry(checkpoint: Path, cache: Path) -> None:
    results: list[object] = []

    def work() -> None:
        try:
            results.append(plain(checkpoint, cache))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({str(r) for r in results}) == 1, results
    (entry,) = cache.iterdir()
    assert str(entry) == str(results[0])
    assert plain(checkpoint, cache) == entry


def test_exports_of_one_checkpoint_take_turns(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that waited find the package of the first: none is moved away under a process that is loading it."""
    built: list[object] = []
    original = package_folder.write_graph

    def count(model: Any, folder: Path) -> None:
        built.append(model)
        time.sleep(0.2)
        original(model, folder)

    monkeypatch.setattr(pipeline, "write_graph", count)
    threads = [threading.Thread(target=plain, args=(checkpoint, cache)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_what_a_killed_export_left_is_removed(checkpoint: Path, cache: Path) -> None:
    entry = plain(checkpoint, cache)
    shutil.rmtree(entry)
    (cache / f".{entry.name}.abcd").mkdir()
    (cache / ".another-model.abcd").mkdir()
    assert plain(checkpoint, cache) == entry
    assert sorted(path.name for path in cache.iterdir()) == [".another-model.abcd", entry.name]


# --- places --------------------------------------------------------------------------------------------------------
def test_out_dir_overwrites_packages_only(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(checkpoint, out, verify=False) == out
    assert export(checkpoint, out, verify=False) == out
    (out / MANIFEST_NAME).unlink()
    with pytest.raises(PackageError, match=r"exists and holds no trivet.json: not overwritten"):
        export(checkpoint, out, verify=False)
    with pytest.raises(PackageError, match="is the checkpoint's own folder"):
        export(checkpoint, checkpoint.parent, verify=False)
    with pytest.raises(PackageError, match="is a file, expected a folder"):
        export(checkpoint, checkpoint, verify=False)


def test_an_unwritable_cache_is_reported(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # a file where a folder must go: works for root, too
    with pytest.raises(
        PackageError, match=r"cannot write the model package .*: (Not a directory|File exists)"
    ) as caught:
        plain(checkpoint, tmp_path / "file")
    assert "TRIVET_HOME" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_is_reported(checkpoint: Path, cache: Path) -> None:
    cache.mkdir(mode=0o555)
    with pytest.raises(PackageError, match=r"Permission denied; free space there or choose a writable place"):
        plain(checkpoint, cache)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_reported(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_to_full_disk(model: object, folder: Path) -> None:
        with open("/dev/full", "wb") as file:
            file.write(bytes(1 << 20))

    monkeypatch.setattr(pipeline, "write_graph", write_to_full_disk)
    with pytest.raises(PackageError, match=r"cannot write the model package .*: No space left on device"):
        plain(checkpoint, cache)
    assert list(cache.iterdir()) == []


def test_trivet_home_names_the_cache(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_HOME", str(tmp_path / "home"))
    assert export(checkpoint, verify=False).parent == tmp_path / "home" / "packages"


def test_the_cache_without_trivet_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the model store has it, so that `trivet rm` finds the packages."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TRIVET_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert package.default_cache_dir() == Path.home() / ".cache" / "trivet" / "packages"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert package.default_cache_dir() == tmp_path / "trivet" / "packages"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(PackageError, match="set TRIVET_HOME to a folder"):
        package.default_cache_dir()


def test_paths_that_are_not_utf8_are_refused(checkpoint: Path, cache: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(checkpoint.parent) + b"/n\xff.gguf"))
    shutil.copy(checkpoint, odd)
    with pytest.raises(CheckpointError, match=r"n\\xff.gguf: the path is not valid UTF-8; rename"):
        plain(odd, cache)


def test_a_hub_cache_snapshot_is_exported_and_runs(tiny: Tiny, tmp_path: Path) -> None:
    repo = tmp_path / "models--org--tiny"
    snapshot, blobs = repo / "snapshots" / "main", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(tiny("llama", "safetensors-sharded").iterdir())):
        shutil.copy(file, blobs / f"{index:064x}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{index:064x}"))
    manifest = read_manifest(export(snapshot, tmp_path / "out"))
    assert manifest.verification.performed
    assert manifest.source_dir == str(blobs)
    assert all(len(source.name) == 64 for source in manifest.sources)


# --- real models ---------------------------------------------------------------------------------------------------
def test_smollm2_is_exported_in_place(smollm2_path: Path, cache: Path) -> None:
    folder = export(smollm2_path, cache_dir=cache)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4_000_000  # the weights are 90 MB
    error = read_manifest(folder).verification.max_relative_error
    assert error is not None and error < 1e-4
    made = (folder / MANIFEST_NAME).stat()
    assert export(smollm2_path, cache_dir=cache) == folder
    found = (folder / MANIFEST_NAME).stat()
    assert (found.st_ino, found.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)  # not made anew


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_real_models_are_exported_in_place(name: str, real_model: Callable[[str], Path], cache: Path) -> None:
    folder = export(real_model(name), cache_dir=cache)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 30_000_000
    error = read_manifest(folder).verification.max_relative_error
    assert error is not None and error < 1e-4
