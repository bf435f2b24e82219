"""What the release tools raise.

ReleaseError
├── MatrixError       an artifact id that release-matrix.json does not hold, or does not let be built
├── ManifestError     a manifest that breaks its schema or contradicts itself
├── ArchiveError      an archive with a wrong name, entry, mode, date or digest
├── GateError         a check of the unpacked tree that failed
├── BuildError        a build step that failed
└── SignatureError    a provenance envelope that is not signed by the key, or not about the archive
"""

from __future__ import annotations


class ReleaseError(Exception):
    """Base of all; its text says what came, what was expected and what to do."""


class MatrixError(ReleaseError):
    pass


class ManifestError(ReleaseError):
    pass


class ArchiveError(ReleaseError):
    pass


class GateError(ReleaseError):
    pass


class BuildError(ReleaseError):
    pass


class SignatureError(ReleaseError):
    pass
