"""Which files of a listing hold GGUF weights: plain files, and split ones (`name-00001-of-00003.gguf`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from .errors import AmbiguousModelError, DownloadError, ModelNotFoundError

_SPLIT = r"(?i)(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf"


def group(names: Iterable[str]) -> dict[str, list[str]]:
    """Weights by label (the path without the part number and suffix) -> files in order of their parts.

    Vision projectors (`mmproj…`) are no language models and are left out. DownloadError when a part is missing.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        if not name.lower().endswith(".gguf") or "mmproj" in PurePosixPath(name).name.lower():
            continue
        match = re.fullmatch(_SPLIT, name)
        groups.setdefault(match["stem"] if match else name[: -len(".gguf")], []).append(name)
    for label, files in groups.items():
        if match := re.fullmatch(_SPLIT, files[0]):
            expected = int(match["count"])
            if len(files) != expected:
                raise DownloadError(f"{label}: {len(files)} of {expected} parts of the split file are there")
    return groups


def select(groups: Mapping[str, Sequence[str]], quant: str | None, origin: str) -> list[str]:
    """The files of the one group that `quant` names (any if None).

    `quant` is a group's label, or a part of its name set off by `-`, `_` or `.`, in either case.
    ModelNotFoundError or AmbiguousModelError list the choices.
    """
    if quant is None:
        fitting = list(groups)
    else:
        wanted = re.compile(rf"(?:^|[-_./]){re.escape(quant)}(?:$|[-./])", re.IGNORECASE)
        exact = [label for label in groups if quant.lower() in (label.lower(), f"{label}.gguf".lower())]
        fitting = exact or [label for label in groups if wanted.search(label)]
    choices = ", ".join(groups)
    if not fitting:
        raise ModelNotFoundError(f"{origin} holds no GGUF file that matches {quant!r}; it holds {choices}")
    if len(fitting) > 1:
        raise AmbiguousModelError(f"{origin} holds {len(fitting)} models that fit; name one of: {', '.join(fitting)}")
    return list(groups[fitting[0]])
