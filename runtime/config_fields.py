"""Fields of the configuration dataclasses: how one is declared, checked and described."""

from __future__ import annotations

from dataclasses import field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from .errors import TrivetError


class ConfigError(TrivetError, ValueError):
    """A configuration that cannot be honoured; the message names the field, the value and what is accepted."""


def option_metadata(
    help: str,
    *,
    flag: str | None = None,
    aliases: tuple[str, ...] = (),
    only: str | None = None,
    default_text: str | None = None,
) -> dict[str, Any]:
    """`flag`: the flat name where that is not the field's; `only`: why nothing but the default is accepted;
    `default_text`: what happens without the option, where the field's default does not say it."""
    return {"help": help, "flag": flag, "aliases": aliases, "only": only, "default_text": default_text}


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A config field with an immutable default; the keywords are those of option_metadata()."""
    return field(default=default, metadata=option_metadata(help, **metadata))


def require(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}; expected {expected}")


def refuse_non_defaults(config: Any) -> None:
    """Fields with `only` exist so that their vLLM default is accepted and anything else refused by name."""
    for f in fields(config):
        value = getattr(config, f.name)
        if f.metadata.get("only") and value != f.default:
            name = f.metadata.get("flag") or f.name
            raise ConfigError(f"{name}={value!r} is not supported, only {f.default!r}: {f.metadata['only']}")


def checked(name: str, value: Any, hint: Any) -> Any:
    """`value` if it is of the field's type (an int also serves as a float)."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for member in members:
        if get_origin(member) is Literal:
            if value in get_args(member) and isinstance(value, str):
                return value
        elif member is NoneType:
            if value is None:
                return None
        elif member is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        elif isinstance(value, get_origin(member) or member) and isinstance(value, bool) == (member is bool):
            return value
    raise ConfigError(f"{name} is {value!r} ({type(value).__name__}); expected {describe_type(hint)}")


def describe_type(hint: Any) -> str:
    """For people: "int", "one of auto, float16", "int or None"."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe_type(member) for member in get_args(hint))
    if hint is NoneType:
        return "None"
    return "a JSON object" if get_origin(hint) is dict else str(hint.__name__)
