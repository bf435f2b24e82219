"""Read config values by intent: required, default, must_equal. Serves config.json and GGUF metadata alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import ConfigError, UnsupportedError

MAX_SIZE: Final = 1 << 24  # of any extent or count; the largest vocabularies have about 2^18 entries


class ConfigReader:
    """Typed, range-checked access to a mapping; remembers which keys were read."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        """`where` begins every message; `prefix` is put before every key (GGUF: "llama.")."""
        self.values = values
        self.where = where
        self.prefix = prefix
        self.read: set[str] = set()

    def raw(self, name: str) -> Any:
        """The value, None if it is absent or null."""
        self.read.add(self.prefix + name)
        return self.values.get(self.prefix + name)

    def has(self, name: str) -> bool:
        return self.raw(name) is not None

    def fail(self, name: str, expected: str) -> ConfigError:
        key = self.prefix + name
        got = repr(self.values[key]) if key in self.values else "missing"
        if len(got) > 200:
            got = got[:200] + "..."
        return ConfigError(f"{self.where}: {key} is {got}, expected {expected}")

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """An integer in [low, high]; without a default it is required."""
        value = self.raw(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.fail(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None, *, low: float, high: float) -> float:
        """A finite number in [low, high]; without a default it is required."""
        value = self.raw(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.fail(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.fail(name, "true or false")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of `choices`; UnsupportedError on another string."""
        value = self.raw(name)
        if value is None and default is not None:
            return default
        if value not in choices:
            error = self.fail(name, "one of " + ", ".join(choices))
            raise UnsupportedError(str(error)) if isinstance(value, str) else error
        return str(value)

    def must_equal(self, name: str, *allowed: Any) -> None:
        """Absent and null are fine; anything else must be one of `allowed`, else UnsupportedError."""
        value = self.raw(name)
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            raise UnsupportedError(str(self.fail(name, " or ".join([*(repr(a) for a in allowed), "absent"]))))

    def section(self, name: str) -> ConfigReader | None:
        """A nested object as a reader of its own; None if absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        return ConfigReader(value, f"{self.where}: {self.prefix}{name}")

    def strings(self, name: str, length: int) -> list[str] | None:
        """A list of `length` strings; None if absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(v, str) for v in value):
            raise self.fail(name, f"a list of {length} strings")
        return value

    def unread(self) -> list[str]:
        """Keys under the prefix that nobody asked for and that are not null."""
        return sorted(
            k for k, v in self.values.items() if v is not None and k.startswith(self.prefix) and k not in self.read
        )
