"""`release rebuild`: build again, in another folder, under another umask, zone and home; the bytes must be the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from .archive import check_checksum, sha256_file
from .build import BuildOptions, build
from .errors import GateError
from .evidence import GateResult
from .matrix import load_matrix
from .names import parse_archive_name
from .source import refuse_in_tree

NOT_TWICE = "libtrivet_cuda was not compiled a second time (--cached-cuda); all else is byte-identical"


def rebuild(archive: Path, options: BuildOptions, evidence: Path, *, cached_cuda: bool = False) -> GateResult:
    """Build the tuple of `archive` a second time, compare, and leave the result in `evidence`.

    `cached_cuda`: a CUDA library is taken from the cache, and so the rebuild proves nothing about the whole archive.
    """
    refuse_in_tree(evidence)
    digest = check_checksum(archive)
    entry = load_matrix().find(parse_archive_name(archive.name).artifact_id)
    with _other_surroundings():
        again = build(entry.artifact_id, replace(options, fresh_cuda=entry.backend == "cuda" and not cached_cuda))
    second = sha256_file(again)
    reason = "" if second == digest else f"the second build has the SHA-256 {second}, the first {digest}"
    partly = entry.backend == "cuda" and cached_cuda and not reason
    state = "failed" if reason else "absent" if partly else "passed"
    command = f"release rebuild {archive.name} --recipe {options.recipe}{' --cached-cuda' if cached_cuda else ''}"
    said = NOT_TWICE if partly else reason
    result = GateResult("rebuild", state, command, said, archive_sha256=digest, details={"second": second})
    evidence.mkdir(parents=True, exist_ok=True)
    (evidence / "rebuild.json").write_bytes(result.report())
    if reason:
        raise GateError(f"{archive.name} is not reproducible: {reason}; compare {archive} and {again}")
    return result


@contextmanager
def _other_surroundings() -> Iterator[None]:
    umask, zone = os.umask(0o077), os.environ.get("TZ")
    os.environ["TZ"] = "Asia/Tokyo"
    try:
        yield
    finally:
        os.umask(umask)
        if zone is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = zone
