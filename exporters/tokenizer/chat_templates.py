"""Where a checkpoint keeps its chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import TokenizerBuildError

_GGUF_KEY = "tokenizer.chat_template"


def from_gguf(metadata: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """(default, named): `tokenizer.chat_template` and `tokenizer.chat_template.NAME`.

    `tokenizer.chat_templates` only lists the names and is not needed.
    """
    named = {
        key.removeprefix(f"{_GGUF_KEY}."): value for key, value in metadata.items() if key.startswith(f"{_GGUF_KEY}.")
    }
    return _checked(metadata.get(_GGUF_KEY), named, _GGUF_KEY)


def from_directory(directory: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """(default, named) of a Hugging Face folder.

    The files chat_template.jinja and additional_chat_templates/NAME.jinja win over `chat_template` of
    tokenizer_config.json, which is a string, a list of {"name", "template"}, or a mapping of names.
    """
    value = tokenizer_config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(value, list):
        try:
            named = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError) as error:
            raise TokenizerBuildError(
                f"{directory / 'tokenizer_config.json'}: chat_template is a list; its entries need name and template"
            ) from error
    elif isinstance(value, dict):
        named = dict(value)
    default = value if isinstance(value, str) else named.pop("default", None)
    if value is not None and not isinstance(value, str | list | dict):
        default = value
    if (directory / "chat_template.jinja").is_file():
        default = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    return _checked(default, named, f"{directory / 'tokenizer_config.json'}: chat_template")


def _checked(default: Any, named: Mapping[str, Any], where: str) -> tuple[str | None, dict[str, str]]:
    for name, template in [("default", default), *named.items()]:
        if template is not None and not isinstance(template, str):
            raise TokenizerBuildError(f"{where} ({name}) is a {type(template).__name__}, expected text")
    return default, dict(named)
