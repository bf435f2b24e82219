"""Loggers that import `logging`, which takes 2 ms of a start, when there is something to log."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import logging


def get_logger(name: str) -> logging.Logger:
    return cast("logging.Logger", _LazyLogger(name))


class _LazyLogger:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        import logging

        return getattr(logging.getLogger(self._name), attribute)

    def info(self, message: str, *args: object, **keywords: Any) -> None:
        if "logging" in sys.modules:  # else nobody can have asked for it
            self.__getattr__("info")(message, *args, **{"stacklevel": 2, **keywords})
