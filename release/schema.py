"""The part of JSON Schema that manifest.schema.json uses, judged strictly: a boolean is no integer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
_WORDS = {
    "$schema", "$id", "$defs", "$ref", "title", "description", "type", "enum", "const", "pattern",
    "minLength", "minimum",
    "properties", "required", "additionalProperties", "items", "minItems", "uniqueItems",
}  # fmt: skip


def schema_problems(value: Any, schema: dict[str, Any]) -> list[str]:
    """Everything in `value` that breaks `schema`, each with the path of the offending field; empty if it conforms."""
    return list(_problems(value, schema, schema, "$"))


def _problems(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str) -> list[str]:
    if unknown := set(schema) - _WORDS:
        raise ValueError(f"schema at {path} uses {', '.join(sorted(unknown))}, which this checker does not know")
    if "$ref" in schema:
        return _problems(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, path)
    out = _scalar_problems(value, schema, path)
    if isinstance(value, dict) and not out:
        out += _object_problems(value, schema, root, path)
    if isinstance(value, list) and not out:
        if len(value) < schema.get("minItems", 0):
            out.append(f"{path}: {len(value)} items, at least {schema['minItems']} expected")
        if schema.get("uniqueItems") and any(item in value[:index] for index, item in enumerate(value)):
            out.append(f"{path}: an item is there twice")
        if "items" in schema:
            for index, item in enumerate(value):
                out += _problems(item, schema["items"], root, f"{path}[{index}]")
    return out


def _scalar_problems(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    out = []
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_TYPES[name](value) for name in types):
            out.append(f"{path}: {_shown(value)} is not of type {' or '.join(types)}")
    if "enum" in schema and not any(_same(value, choice) for choice in schema["enum"]):
        out.append(f"{path}: {_shown(value)} is none of {', '.join(map(_shown, schema['enum']))}")
    if "const" in schema and not _same(value, schema["const"]):
        out.append(f"{path}: {_shown(value)} instead of {_shown(schema['const'])}")
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            out.append(f"{path}: empty")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            out.append(f"{path}: {_shown(value)} does not match {schema['pattern']}")
    if isinstance(value, int) and not isinstance(value, bool) and value < schema.get("minimum", value):
        out.append(f"{path}: {value} is below {schema['minimum']}")
    return out


def _object_problems(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], path: str) -> list[str]:
    properties = schema.get("properties", {})
    out = [f"{path}.{name}: missing" for name in schema.get("required", []) if name not in value]
    for name, item in value.items():
        if name in properties:
            out += _problems(item, properties[name], root, f"{path}.{name}")
        elif schema.get("additionalProperties") is False:
            out.append(f"{path}.{name}: not a field of the schema")
        elif isinstance(schema.get("additionalProperties"), dict):
            out += _problems(item, schema["additionalProperties"], root, f"{path}.{name}")
    return out


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
