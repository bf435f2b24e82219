"""trivet: an embeddable LLM runtime. Importing it loads nothing heavy; the public names are imported on first use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# onnxruntime >= 1.29 reports home unless this is set before its first import.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# The threads of NumPy's OpenBLAS spin for 100 ms after its import and after every product, on the cores that kernels
# need, unless this is set before that import: now for 2^16 cycles.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")

if TYPE_CHECKING:
    from .runtime.async_llm import AsyncLLM
    from .runtime.llm import LLM
    from .runtime.outputs import CompletionOutput, RequestOutput
    from .runtime.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_PUBLIC = {
    "LLM": "runtime.llm",
    "AsyncLLM": "runtime.async_llm",
    "SamplingParams": "runtime.sampling_params",
    "RequestOutput": "runtime.outputs",
    "CompletionOutput": "runtime.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'trivet' has no attribute {name!r}")
    from importlib import import_module

    from ._garbage import collection_paused

    import_module(".runtime.interrupts", __name__).import_native_modules("msgspec")
    with collection_paused():
        value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value  # later uses do not come here: each pause makes all young garbage old
    return value
