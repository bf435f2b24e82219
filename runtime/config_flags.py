"""The configuration as command-line flags, generated from the structs of config.py.

Names are the flat names of EngineConfig.from_kwargs, with hyphens.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from .config import SECTIONS, flat_fields
from .config_fields import ConfigError, describe_type, fields_of

_DECIMAL: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class CliField:
    """One flag. `kind`: "bool" has a --no- form; "json" also takes dotted sub-flags (--name.key VALUE)."""

    name: str  # flat name, key of EngineConfig.from_kwargs
    kind: Literal["bool", "int", "float", "str", "json"]
    default: Any
    help: str
    default_text: str  # the default, for people
    hidden: bool  # takes nothing but its default, so the help leaves it out
    group: str  # "ModelConfig", ... for headings
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()  # flags besides the first, with their hyphens

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def iter_cli_fields() -> Iterator[CliField]:
    """Every option but `model`, in the order of definition."""
    for config_class in SECTIONS.values():
        defaults = config_class()
        for field_name, hint, option in fields_of(config_class):
            name, default = option.flag or field_name, getattr(defaults, field_name)
            if name == "model":
                continue
            aliases = tuple("--" + alias.replace("_", "-") for alias in option.aliases)
            kind, choices = _kind_of(hint)
            default_text = option.default_text or _default_text(default)
            hidden = option.only is not None or (choices is not None and len(choices) == 1)
            group = config_class.__name__
            yield CliField(name, kind, default, option.help, default_text, hidden, group, choices, aliases)


def _default_text(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default in (None, {}) else str(default)


def _kind_of(hint: Any) -> tuple[Literal["bool", "int", "float", "str", "json"], tuple[str, ...] | None]:
    if get_origin(hint) in (Union, UnionType):
        hint = next(member for member in get_args(hint) if member is not NoneType)
    if get_origin(hint) is Literal:
        return "str", get_args(hint)
    if get_origin(hint) is dict:
        return "json", None
    kinds: dict[Any, Literal["bool", "int", "float", "str"]] = {bool: "bool", int: "int", float: "float", str: "str"}
    return kinds[hint], None


def add_cli_flags(parser: argparse.ArgumentParser, default_texts: Mapping[str, str] | None = None) -> None:
    """Add every flag to `parser`; those not given stay out of the namespace, so that defaults remain the config's.

    default_texts: by field name, the defaults that a command has of its own, for its help.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for f in iter_cli_fields():
        if f.group not in groups:
            groups[f.group] = parser.add_argument_group(f.group)
        group = groups[f.group]
        default_text = (default_texts or {}).get(f.name, f.default_text)
        text = f"{f.help.removesuffix('.')} (default: {default_text})".replace("%", "%%")
        help_text = argparse.SUPPRESS if f.hidden else text
        names = (f.flag, *f.aliases)
        if f.kind == "bool":
            group.add_argument(
                *names, dest=f.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text
            )
        else:
            group.add_argument(
                *names, dest=f.name, type=_argparse_type(f.name), default=argparse.SUPPRESS, help=help_text,
                metavar="{" + ",".join(f.choices) + "}" if f.choices else f.kind.upper(),
            )  # fmt: skip


def _argparse_type(name: str) -> Any:
    def parse(text: str) -> Any:
        try:
            return parse_value(name, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


# --- values -------------------------------------------------------------------------------------------------------
def human_readable_int(text: str) -> int:
    """4096, 4k = 4000, 4K = 4096, 1.5k = 1500; m/M, g/G, t/T likewise. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    if suffix in _DECIMAL:
        return round(float(number) * _DECIMAL[suffix])
    if "." in number:
        raise ValueError(f"the binary suffix {suffix} takes whole numbers only; {number}{suffix.lower()} is decimal")
    return int(number) * _BINARY[suffix]


def parse_value(name: str, text: str) -> Any:
    """The value of option `name` as written on a command line. Raises ConfigError; ranges are checked later."""
    if name not in flat_fields():
        raise ConfigError(f"unknown option {name!r}")
    hint = flat_fields()[name][2]
    kind, choices = _kind_of(hint)
    optional = NoneType in get_args(hint)
    if optional and text.lower() == "none":
        return None
    if name == "max_model_len" and text.lower() == "auto":
        return -1
    try:
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "json":
            return _json_object(text)
        value: Any = text
        if kind != "str":
            value = human_readable_int(text) if kind == "int" else float(text)
    except (KeyError, ValueError) as error:
        detail = f" ({error})" if isinstance(error, ValueError) else ""
        raise ConfigError(f"{name} is {text!r}; expected {describe_type(hint)}{detail}") from error
    if choices and value not in choices:
        raise ConfigError(f"{name} is {text!r}; expected one of {', '.join(choices)}")
    return value


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def expand_dotted_flags(argv: Sequence[str], json_names: Collection[str]) -> list[str]:
    """Turn `--name.key VALUE`, `--name.key=VALUE` and `--name.list+ VALUE` into one `--name JSON` each.

    json_names: options (flat names) that take objects. A value that reads as JSON is that, anything else a string.
    A plain `--name JSON` of the same option is merged in. The result stands where the option first came. Raises
    ConfigError for a missing value or a clash.
    """
    objects: dict[str, dict[str, Any]] = {}
    positions: dict[str, int] = {}  # of an option's value in `rest`
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
            break
        flag, equals, value = word.partition("=")
        name, dot, path = flag[2:].partition(".") if flag.startswith("--") else ("", "", "")
        name = name.replace("-", "_")
        if name not in json_names:
            rest.append(word)
            continue
        if not equals:
            try:
                value = next(words)
            except StopIteration:
                raise ConfigError(f"{flag} needs a value") from None
        if name not in objects:
            objects[name] = {}
            rest += ["--" + name.replace("_", "-"), ""]
            positions[name] = len(rest) - 1
        target = objects[name]
        if dot:
            _put(target, path.split("."), _loose_json(value), flag)
            continue
        for key, item in parse_value_object(flag, value).items():
            _put(target, [key], item, flag)
    for name, value_object in objects.items():
        rest[positions[name]] = json.dumps(value_object)
    return rest


def parse_value_object(flag: str, text: str) -> dict[str, Any]:
    """A JSON object; ConfigError names the flag otherwise."""
    try:
        return _json_object(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}; expected a JSON object ({error})") from error


def _put(target: dict[str, Any], path: list[str], value: Any, flag: str) -> None:
    for key in path[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{flag}: {key!r} already has a value that is not an object")
    key = path[-1]
    if key.endswith("+"):
        items = target.setdefault(key[:-1], [])
        if not isinstance(items, list):
            raise ConfigError(f"{flag}: {key[:-1]!r} already has a value that is not a list")
        items.append(value)
    elif key in target:
        raise ConfigError(f"{flag}: {key!r} is given twice")
    else:
        target[key] = value


def _loose_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
