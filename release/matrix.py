"""release-matrix.json: which archives may exist, and why the others do not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import MatrixError
from .names import CHECKING_FILES, INDEX_FILES, ArchiveName, archive_name

MATRIX_FILE = Path(__file__).with_name("release-matrix.json")
STATES = ("buildable", "pending", "blocked")
CHANNELS = ("stable", "preview", "blocked")
MAX_ARCHIVE_BYTES = 60_000_000


@dataclass(frozen=True, slots=True)
class Tuple:
    artifact_id: str
    os: str  # "linux", "macos", "windows"
    arch: str  # "x86_64", "aarch64", "arm64"
    libc: str | None  # "glibc", "musl"; None where the system has one only
    backend: str  # "cpu", "cuda", "vulkan", "metal", "metal-mlx", "rocm", "cpu-static"
    archive_format: str  # "tar.gz" or "zip"
    state: str  # STATES; only "buildable" can be built, verified, published and indexed
    reason: str  # why the state is not "buildable"; empty if it is
    max_channel: str  # the best channel that evidence can bring it to
    asset_set: str  # "release", "windows-prerelease" or "none": which count of assets it belongs to
    cpu_tiers: tuple[str, ...]  # tiers of the op library that the archive must hold and prove
    sms: tuple[str, ...]  # CUDA architectures, likewise
    external: tuple[str, ...]  # what the machine must bring and the archive must never hold
    limits: tuple[str, ...]  # sentences for the index and the manifest
    size_reason: str = ""  # why its archive may be larger than MAX_ARCHIVE_BYTES; empty = it may not
    by_hand: str = ""  # why the release workflow does not build it though it is buildable; empty = it does


@dataclass(frozen=True, slots=True)
class Matrix:
    tuples: tuple[Tuple, ...]
    sms: tuple[str, ...]  # all CUDA architectures of a fat artifact
    aot_sms: tuple[str, ...]  # those with kernels that were written for them; the others take the portable ones

    def find(self, artifact_id: str) -> Tuple:
        """The tuple; MatrixError lists the known ones."""
        for entry in self.tuples:
            if entry.artifact_id == artifact_id:
                return entry
        raise MatrixError(
            f"release-matrix.json holds no artifact {artifact_id!r}; it holds "
            + ", ".join(entry.artifact_id for entry in self.tuples)
        )

    def released(self) -> tuple[Tuple, ...]:
        """Those that the release workflow builds, verifies and publishes: all of them or none."""
        return tuple(entry for entry in self.tuples if entry.state == "buildable" and not entry.by_hand)

    def require_buildable(self, artifact_id: str, action: str) -> Tuple:
        """The tuple, if `action` (built, verified, published, indexed) is allowed; else MatrixError with the reason."""
        entry = self.find(artifact_id)
        if entry.state != "buildable":
            raise MatrixError(f"{artifact_id} cannot be {action}: it is {entry.state}: {entry.reason}")
        return entry


def size_problems(entry: Tuple, num_bytes: int) -> list[str]:
    """Whether an archive of the tuple may be that large."""
    if num_bytes <= MAX_ARCHIVE_BYTES or entry.size_reason:
        return []
    return [f"{num_bytes / 1e6:.1f} MB, without a size_reason at most {MAX_ARCHIVE_BYTES / 1e6:g} MB"]


def asset_names(matrix: Matrix, version: str, asset_sets: tuple[str, ...]) -> list[str]:
    """All file names of a release that holds every tuple of these sets."""
    names: list[str] = [*INDEX_FILES, *CHECKING_FILES]
    for entry in matrix.tuples:
        if entry.asset_set in asset_sets:
            name = archive_name(version, entry.artifact_id, entry.archive_format)
            names += [str(name), *name.companions]
    return names


def table(matrix: Matrix) -> list[str]:
    """The matrix for readers, as lines of Markdown; README.md holds exactly these."""
    lines = ["| artifact id | state | at best | why |", "| --- | --- | --- | --- |"]
    for entry in matrix.tuples:
        why = f"by hand alone: {entry.by_hand}" if entry.by_hand else entry.reason
        lines.append(f"| {entry.artifact_id} | {entry.state} | {entry.max_channel} | {why} |")
    return lines


def load_matrix(path: Path = MATRIX_FILE) -> Matrix:
    """Read and judge the matrix; MatrixError names the first thing that is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        matrix = Matrix(
            tuples=tuple(_tuple(entry, data) for entry in data["tuples"]),
            sms=tuple(data["sms"]),
            aot_sms=tuple(data["aot_sms"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MatrixError(f"{path} is not a release matrix: {type(error).__name__}: {error}") from error
    ids = [entry.artifact_id for entry in matrix.tuples]
    if doubled := sorted({name for name in ids if ids.count(name) > 1}):
        raise MatrixError(f"{path}: twice: {', '.join(doubled)}")
    if foreign := sorted(set(matrix.aot_sms) - set(matrix.sms)):
        raise MatrixError(f"{path}: aot_sms holds {', '.join(foreign)}, which sms does not")
    for entry in matrix.tuples:
        _check_tuple(entry, matrix)
    return matrix


def _tuple(entry: dict[str, Any], data: dict[str, Any]) -> Tuple:
    lists = ("cpu_tiers", "sms", "external", "limits")
    fields: dict[str, Any] = {name: tuple(value) if name in lists else value for name, value in entry.items()}
    if fields.get("sms") == ("all",):
        fields["sms"] = tuple(data["sms"])
    return Tuple(**fields)


def _check_tuple(entry: Tuple, matrix: Matrix) -> None:
    name = ArchiveName("0.0.0", entry.artifact_id, entry.archive_format)
    archive_name(name.version, name.artifact_id, name.format)  # the id is one that names.py knows
    parts = [entry.os, entry.arch, *([entry.libc] if entry.libc else []), entry.backend]
    problems = []
    if entry.artifact_id != "-".join(parts):
        problems.append(f"its parts spell {'-'.join(parts)}")
    if entry.state not in STATES:
        problems.append(f"its state {entry.state!r} is none of {', '.join(STATES)}")
    if (entry.state == "buildable") == bool(entry.reason):
        problems.append("it needs a reason exactly when it is not buildable")
    if entry.by_hand and entry.state != "buildable":
        problems.append("it is built by hand and not buildable")
    if entry.max_channel not in CHANNELS or (entry.state == "blocked") != (entry.max_channel == "blocked"):
        problems.append(f"max_channel {entry.max_channel!r} does not go with state {entry.state!r}")
    if entry.backend == "cuda" and entry.sms != matrix.sms:
        problems.append(f"a CUDA artifact is fat: its sms must be {', '.join(matrix.sms)}")
    if (entry.archive_format == "zip") != (entry.os == "windows"):
        problems.append("Windows archives are zip, all others tar.gz")
    if problems:
        raise MatrixError(f"release-matrix.json: {entry.artifact_id}: {'; '.join(problems)}")
