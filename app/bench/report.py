"""Results as a table for people, as JSON for programs and in files."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ..cli.errors import CliError, UsageError
from .metrics import DESCRIPTIONS, METRIC_NAMES

_WIDTH = 58


def comma_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_percentiles(text: str) -> list[float]:
    """`25,50,99.9`; UsageError names what is no percentile."""
    try:
        values = [float(part) for part in comma_list(text)]
    except ValueError:
        values = [-1.0]
    if not values or not all(0 <= value <= 100 for value in values):
        raise UsageError(f"--metric-percentiles is {text!r}; expected numbers from 0 to 100, as in 50,90,99")
    return values


def parse_metrics(text: str) -> list[str]:
    names = comma_list(text)
    for name in names:
        if name not in METRIC_NAMES:
            raise UsageError(f"--percentile-metrics has {name!r}; expected some of {','.join(METRIC_NAMES)}")
    return names


def timestamp() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def to_jsonable(value: Any) -> Any:
    """Configuration objects as plain JSON values."""
    if isinstance(value, msgspec.Struct):
        return {name: to_jsonable(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def write_json(path: Path, result: Mapping[str, Any], *, append: bool = False) -> None:
    """One JSON object, with `append` one more line of a file of objects. CliError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=None if append else 2, allow_nan=False) + "\n")
    except OSError as error:
        raise CliError(f"the result cannot be written to {path}: {error.strerror}") from error


def print_result(args: Namespace, title: str, rows: Sequence[tuple[str, Any]], result: Mapping[str, Any]) -> None:
    """To stdout: the JSON under --json, else the rows and the metrics."""
    if args.json:
        print(json.dumps(result, allow_nan=False))
        return
    out = sys.stdout
    print(f"{f' {title} ':=^{_WIDTH}}", file=out)
    for label, value in rows:
        print(_row(label, value), file=out)
    for name in METRIC_NAMES:
        keys = [key for key in result if key.endswith(f"_{name}_ms")]
        if keys:
            print(f"{DESCRIPTIONS[name]:-^{_WIDTH}}", file=out)
        for key in keys:
            label = key.partition("_")[0]
            print(_row(f"{label if label.startswith('p') else label.title()} {name.upper()} (ms):", result[key]))
    print("=" * _WIDTH, file=out)


def _row(label: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)
    return f"{label:<40} {text:<10}".rstrip()
