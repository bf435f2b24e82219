"""`release rebuild`: build again, in another folder, under another umask, zone and home; the bytes must be the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .archive import check_checksum, sha256_file
from .build import BuildOptions, build
from .errors import GateError
from .evidence import GateResult
from .names import parse_archive_name
from .source import refuse_in_tree


def rebuild(archive: Path, options: BuildOptions, evidence: Path) -> GateResult:
    """Build the tuple of `archive` a second time, compare, and leave the result in `evidence`."""
    refuse_in_tree(evidence)
    digest = check_checksum(archive)
    with _other_surroundings():
        again = build(parse_archive_name(archive.name).artifact_id, options)
    second = sha256_file(again)
    reason = "" if second == digest else f"the second build has the SHA-256 {second}, the first {digest}"
    state = "failed" if reason else "passed"
    command = f"release rebuild {archive.name} --recipe {options.recipe}"
    result = GateResult("rebuild", state, command, reason, archive_sha256=digest, details={"second": second})
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
