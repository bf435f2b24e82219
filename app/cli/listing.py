"""How stored models and packages are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...exporters.package_cache import CachedPackage
    from ...runtime.model_store import StoredModel


def as_dict(model: StoredModel) -> dict[str, Any]:
    """A model for programs."""
    record = model.record
    return {
        "name": record.name,
        "reference": record.reference,
        "revision": record.revision,
        "path": str(model.path),
        "size_bytes": model.size_bytes,
        "license": record.license,
        "pulled_at": record.pulled_at,
        "files": [{"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in record.files],
    }


def export_as_dict(export: CachedPackage) -> dict[str, Any]:
    """An exported package for programs; `problem` is null where it is good."""
    return {
        "path": str(export.directory),
        "size_bytes": export.size_bytes,
        "checkpoint": export.checkpoint or None,
        "problem": export.problem or None,
    }


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell, two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
