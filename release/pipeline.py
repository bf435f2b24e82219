"""`release all`: build, build again, verify, sign and index one tuple, in one command, with the time of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .build import BuildOptions, build
from .errors import GateError
from .index import make_index
from .process import run
from .rebuild import rebuild
from .source import refuse_in_tree
from .verify import VerifyOptions, attest, verify

T = TypeVar("T")


def release_all(
    artifact_id: str, options: BuildOptions, evidence: Path, model: Path | None, *, cached_cuda: bool = False
) -> dict[str, Any]:
    """The manifest with evidence; ReleaseError at the first step that fails. No `options.key` = a key made for this."""
    refuse_in_tree(evidence)
    evidence.mkdir(parents=True, exist_ok=True)
    key = options.key or _test_key(options.work)
    public = evidence / "release.pub"
    run(["openssl", "pkey", "-in", key, "-pubout", "-out", public])
    first, second = options.work / "first", options.work / "second"
    archive = _timed("build", lambda: build(artifact_id, replace(options, work=first, key=key)))
    again = replace(options, work=second, out=options.work / "again", key=None)
    _timed("build again", lambda: rebuild(archive, again, evidence, cached_cuda=cached_cuda))
    manifest = _timed("verify", lambda: verify(archive, VerifyOptions(evidence, model, public)))
    failed = [
        f"{name}: {entry['reason']}" for name, entry in manifest["evidence"].items() if entry["state"] == "failed"
    ]
    if failed:
        raise GateError(f"{archive.name} did not pass: {'; '.join(failed)}")
    _timed("sign", lambda: attest(archive, evidence, key))
    _timed("index", lambda: make_index(options.out, public))
    if options.key is None:
        print(f"signed with a key made for this and not kept; {public} checks it", flush=True)
    return manifest


def _timed(step: str, action: Callable[[], T]) -> T:
    started = time.monotonic()
    result = action()
    print(f"{step}: {time.monotonic() - started:.0f} s", flush=True)
    return result


def _test_key(folder: Path) -> Path:
    """A key for trying it out, in the temporary folder, so never published; a release is signed with the caller's."""
    path = folder / "test.key"
    path.parent.mkdir(parents=True, exist_ok=True)
    run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", path])
    path.chmod(0o600)
    return path
