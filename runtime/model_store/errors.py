"""What can go wrong with a model reference or the model store. Every message is one complete line."""

from __future__ import annotations

from ..errors import ModelLoadError


class ModelStoreError(ModelLoadError):
    """Root of the tree."""


class InvalidReferenceError(ModelStoreError):
    """The text is no model reference."""


class ModelNotFoundError(ModelStoreError):
    """No model under this reference; the message lists what was tried."""


class AmbiguousModelError(ModelStoreError):
    """Several files fit the reference; the message lists the choices."""


class DownloadError(ModelStoreError):
    """A model could not be fetched."""


class DigestMismatchError(DownloadError):
    """What was fetched is not what the catalogue pins; it was removed."""


class CacheError(ModelStoreError):
    """The cache folder cannot be used: read-only, full, or not a folder."""
