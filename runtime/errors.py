"""The exceptions of the runtime. Every message is complete: what came, what was expected, what to do."""

from __future__ import annotations


class TrivetError(Exception):
    """Root of the tree; `except TrivetError` catches everything that the runtime raises on purpose."""


class InvalidRequestError(TrivetError, ValueError):
    """A request that can never be served as it is (HTTP 400). Other requests are unharmed."""


class EngineDeadError(TrivetError):
    """The engine stopped after an internal error; `__cause__` holds it. Make a new engine to go on (HTTP 503)."""


class ModelLoadError(TrivetError):
    """A model package or its checkpoint cannot be loaded."""


class KVCacheError(TrivetError):
    """The KV cache cannot be sized or allocated as configured."""
