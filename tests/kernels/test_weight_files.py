"""The weight files of a session: mapped once, named when they are missing, watched for writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from trivet.backends.contract.manifest import read_manifest
from trivet.backends.errors import CheckpointChangedError, SessionCreateError
from trivet.backends.session import ModelSession
from trivet.exporters import export

from .steps import BLOCK_SIZE, step_inputs

PROMPT = list(range(3, 44))


@pytest.fixture(scope="module")
def package(tiny: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny("llama", "gguf-q8_0"), tmp_path_factory.mktemp("package") / "llama", verify=False)


def test_a_weight_file_that_is_cut_short_is_an_error_not_a_crash(
    tiny: Callable[[str, str], Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "model.gguf"
    shutil.copy(tiny("llama", "gguf-q8_0"), checkpoint)
    package = export(checkpoint, tmp_path / "package", verify=False)
    with ExitStack() as closing:
        sessions = [ModelSession(package, read_manifest(package)) for _ in range(2)]
        for session in sessions:
            closing.callback(session.close)
            session.allocate_kv_cache(num_blocks=8, block_size=BLOCK_SIZE, dtype="float32")
        step = step_inputs(PROMPT, 0)
        expected = sessions[0].run(step, ["logits"])["logits"]
        renamed = tmp_path / "renamed"
        checkpoint.rename(renamed)
        checkpoint.write_bytes(b"")  # another file under the old name
        np.testing.assert_array_equal(sessions[0].run(step, ["logits"])["logits"], expected)
        size = renamed.stat().st_size
        os.truncate(renamed, 1000)
        says = rf"model\.gguf: the checkpoint was written to .* \({size} bytes when it was loaded, 1000 now\)"
        for session in sessions:
            with pytest.raises(CheckpointChangedError, match=says):
                session.run(step, ["logits"])


def test_a_missing_checkpoint_is_named(package: Path, tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(read_manifest(package), source_dir=str(tmp_path))
    with pytest.raises(SessionCreateError, match=read_manifest(package).sources[0].name):
        ModelSession(package, manifest)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are counted in /proc")
def test_a_weight_file_is_mapped_once_and_given_back(package: Path) -> None:
    """Parts of it would be too short for huge pages."""
    manifest = read_manifest(package)
    name = manifest.sources[0].name

    def maps() -> int:
        return sum(line.rstrip().endswith(f"/{name}") for line in Path("/proc/self/maps").read_text().splitlines())

    before = maps()
    session = ModelSession(package, manifest)
    assert maps() == before + 1
    session.close()
    assert maps() == before
