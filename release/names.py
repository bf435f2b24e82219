"""The one spelling of release file names: <project>-<version>-<artifact-id>.<tar.gz|zip> and its two companions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ArchiveError

PROJECT = "trivet"
CHECKSUM_SUFFIX = ".sha256"
PROVENANCE_SUFFIX = ".provenance.json"
INDEX_FILES = ("index.json", "index.html")
# What a stranger checks an archive with: published beside the archives, the same for all of them.
VERIFIER, PUBLIC_KEY = "verify_archive.py", "release.pub"
CHECKING_FILES = (VERIFIER, PUBLIC_KEY)

_VERSION = r"(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)(?:-[0-9A-Za-z]+(?:\.[0-9A-Za-z]+)*)?"
# os-arch[-libc]-backend; the four parts are what release-matrix.json spells out.
_ARTIFACT_ID = r"(?:linux-(?:x86_64|aarch64)-(?:glibc|musl)|macos-arm64|windows-x86_64)-[a-z][a-z0-9]*(?:-[a-z]+)?"
_ARCHIVE = re.compile(rf"{PROJECT}-(?P<version>{_VERSION})-(?P<artifact_id>{_ARTIFACT_ID})\.(?P<format>tar\.gz|zip)")


@dataclass(frozen=True, slots=True)
class ArchiveName:
    version: str  # semantic version, without a leading v
    artifact_id: str  # as release-matrix.json spells it
    format: str  # "tar.gz" or "zip"

    def __str__(self) -> str:
        return f"{self.top_folder}.{self.format}"

    @property
    def top_folder(self) -> str:
        """The one folder at the root of the archive."""
        return f"{PROJECT}-{self.version}-{self.artifact_id}"

    @property
    def companions(self) -> tuple[str, str]:
        """File names of the checksum and the provenance."""
        return f"{self}{CHECKSUM_SUFFIX}", f"{self}{PROVENANCE_SUFFIX}"


def archive_name(version: str, artifact_id: str, archive_format: str) -> ArchiveName:
    """The name for these parts; ArchiveError for parts that no release may have."""
    return parse_archive_name(str(ArchiveName(version, artifact_id, archive_format)))


def parse_archive_name(name: str) -> ArchiveName:
    """The parts of a file name; ArchiveError for any other spelling."""
    match = _ARCHIVE.fullmatch(name)
    if match is None:
        raise ArchiveError(
            f"{name!r} is no release archive name; expected {PROJECT}-VERSION-ARTIFACT_ID.tar.gz (.zip on Windows) "
            "with an artifact id of release-matrix.json"
        )
    return ArchiveName(match["version"], match["artifact_id"], match["format"])


def version_of_tag(tag: str) -> str:
    """The version that a release tag (v1.2.3) names. Tags are untrusted text: anything else is an ArchiveError."""
    if not re.fullmatch(rf"v{_VERSION}", tag):
        raise ArchiveError(f"{tag!r} is no release tag; expected v followed by a semantic version, like v1.2.3")
    return tag[1:]
