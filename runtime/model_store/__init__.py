"""Models by name: what a model reference means, and the store of pulled models. Only pulling uses the network."""

from __future__ import annotations

from .catalogue import CatalogueEntry, catalogue
from .errors import (
    AmbiguousModelError,
    CacheError,
    DigestMismatchError,
    DownloadError,
    InvalidReferenceError,
    ModelNotFoundError,
    ModelStoreError,
)
from .locations import home, models_dir, packages_dir
from .progress import Progress
from .reference import has_scheme
from .resolve import find_name, find_reference, pull, resolve
from .store import Record, StoredFile, StoredModel, broken_folders, list_models
from .store import remove as remove_model

__all__ = [
    "AmbiguousModelError",
    "CacheError",
    "CatalogueEntry",
    "DigestMismatchError",
    "DownloadError",
    "InvalidReferenceError",
    "ModelNotFoundError",
    "ModelStoreError",
    "Progress",
    "Record",
    "StoredFile",
    "StoredModel",
    "broken_folders",
    "catalogue",
    "find_name",
    "find_reference",
    "has_scheme",
    "home",
    "list_models",
    "models_dir",
    "packages_dir",
    "pull",
    "remove",
    "remove_model",
    "resolve",
]


def remove(name: str) -> StoredModel:
    """Delete the stored model of a name or reference; ModelNotFoundError when there is none."""
    model = find_name(name)
    if model is None:
        names = ", ".join(model.record.name for model in list_models()) or "nothing"
        raise ModelNotFoundError(f"no model {name!r} in the cache, which holds {names}")
    remove_model(model)
    return model
