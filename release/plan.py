"""`release plan`: the first step of a release. It reads, and decides what would be built; it changes nothing."""

from __future__ import annotations

from typing import Any

from .errors import ArchiveError
from .matrix import load_matrix
from .names import archive_name, version_of_tag
from .source import read_source


def plan(tag: str | None) -> dict[str, Any]:
    """Archives of a release of this tree, which the workflow builds; and why not the others.

    No tag = a dry run, which never publishes; ArchiveError for a foreign tag.
    """
    source = read_source()
    if tag is not None and version_of_tag(tag) != source.version:
        raise ArchiveError(f"tag {tag}, but the version of the tree is {source.version}")
    matrix = load_matrix()
    return {
        "version": source.version,
        "commit": source.commit,
        "tag": tag,
        "may_publish": tag is not None and source.tag == tag and source.clean_tree,
        "archives": [
            {
                "artifact_id": entry.artifact_id,
                "archive": str(archive_name(source.version, entry.artifact_id, entry.archive_format)),
            }
            for entry in matrix.released()
        ],
        "left_out": {
            entry.artifact_id: f"buildable by hand: {entry.by_hand}"
            if entry.by_hand
            else f"{entry.state}: {entry.reason}"
            for entry in matrix.tuples
            if entry not in matrix.released()
        },
    }
