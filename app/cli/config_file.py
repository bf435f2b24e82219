"""`--config FILE`: a YAML file of flags. Flags on the command line win over the file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import UsageError
from .parser import ArgumentParser, suggestion


def expand(argv: Sequence[str], parser: ArgumentParser) -> list[str]:
    """argv with dotted flags joined, and those of its `--config` file put in front, where later ones override them.

    Keys are flag names without the dashes (`max-model-len` or `max_model_len`). UsageError for a file that cannot be
    read, a key that is no flag of the command, or a value that no flag can have.
    """
    from ...runtime.config_flags import expand_dotted_flags

    argv = expand_dotted_flags(argv, _json_names(parser))
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--config", action="append")
    found, rest = scan.parse_known_args(argv)
    if not found.config:
        return argv
    if len(found.config) > 1:
        raise UsageError(f"--config was given {len(found.config)} times; one file is expected")
    path = Path(found.config[0])
    flags: list[str] = []
    for key, value in _read(path).items():
        flags += _to_flags(path, key, value, parser)
    # `--config` itself stands between, so that a flag with several values does not swallow a positional of `rest`.
    return [*flags, f"--config={path}", *rest]


def _json_names(parser: ArgumentParser) -> list[str]:
    """Names of the flags that take JSON objects, and so dotted sub-flags too (`--name.key VALUE`)."""
    names = ("override_generation_config", "default_chat_template_kwargs", "chat_template_kwargs")
    return [name for name in names if parser.find_flag("--" + name.replace("_", "-")) is not None]


def _read(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: expected a mapping of flags to values, got {type(content).__name__}")
    mapping: Any = yaml.compose(text, yaml.SafeLoader)
    names = [str(key.value).replace("_", "-") for key, _ in mapping.value]
    if twice := sorted({name for name in names if names.count(name) > 1}):  # the loader would keep the last one
        raise UsageError(f"--config {path}: {', '.join(twice)} given more than once")
    return content


def _to_flags(path: Path, key: Any, value: Any, parser: ArgumentParser) -> list[str]:
    flag = "--" + str(key).replace("_", "-")
    action = parser.find_flag(flag)
    if action is None or flag in ("--config", "--help"):
        raise UsageError(f"--config {path}: {key!r} is no flag of `{parser.prog}`{suggestion(flag, parser.flags())}")
    if isinstance(value, bool):
        if action.nargs == 0 and value:
            return [flag]
        negative = f"--no-{flag[2:]}"
        if action.nargs == 0 and negative in action.option_strings:
            return [negative]
        if action.nargs == 0:
            return []  # a switch that is off unless given
        raise UsageError(f"--config {path}: {key!r} takes a value, got {value}")
    if action.nargs == 0:
        raise UsageError(f"--config {path}: {key!r} is a switch, expected true or false, got {value!r}")
    if isinstance(value, list):
        if action.nargs in ("*", "+"):
            return [flag, *(_text(path, key, item) for item in value)]
        if not isinstance(action, argparse._AppendAction):
            raise UsageError(f"--config {path}: {key!r} takes one value, got a list of {len(value)}")
        return [f"{flag}={_text(path, key, item)}" for item in value]
    return [f"{flag}={_text(path, key, value)}"]


def _text(path: Path, key: Any, value: Any) -> str:
    if isinstance(value, dict):
        import json

        return json.dumps(value)
    if not isinstance(value, str | int | float):
        raise UsageError(f"--config {path}: {key!r} has the unusable value {value!r}")
    return str(value)
