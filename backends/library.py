"""Finds the CPU's op library and calls what of it is no op. Importing this loads neither onnxruntime nor numpy."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contract.formats import FORMATS
from .errors import LibraryNotFoundError, UnsupportedDeviceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CPU_LIBRARY = Path(__file__).parent / "cpu" / "libtrivet_cpu.so"
TIER_VARIABLE = "TRIVET_CPU_TIER"


class BytePairTables(ctypes.Structure):
    """Addresses of the sections of a byte_pairs.bin (contract/byte_pairs.py), as cpu/byte_pairs.h has them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first", "right", "rank", "product", "text_end", "by_text", "text")),
        ("num_words", ctypes.c_uint32),
        ("whole_words", ctypes.c_uint32),
    )


def cpu_library_path() -> Path:
    """Path of libtrivet_cpu; LibraryNotFoundError says how to build it."""
    if not _CPU_LIBRARY.is_file():
        raise LibraryNotFoundError(
            f"{_CPU_LIBRARY} does not exist: the op library is not built. In a checkout run `pip install -e .`; "
            "an installed trivet without it comes from a broken or foreign-platform wheel, reinstall trivet"
        )
    return _CPU_LIBRARY


@cache
def _cpu_library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(cpu_library_path()))
    library.trivet_cpu_describe.argtypes = [ctypes.c_char_p]
    library.trivet_cpu_describe.restype = ctypes.c_char_p
    library.trivet_cpu_check_tier.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.trivet_cpu_check_tier.restype = ctypes.c_char_p
    pointer = ctypes.c_void_p
    library.trivet_cpu_merge_byte_pairs.argtypes = [ctypes.POINTER(BytePairTables), pointer, pointer, ctypes.c_int64]
    library.trivet_cpu_merge_byte_pairs.restype = ctypes.c_int64
    library.trivet_cpu_map_cached_pages.argtypes = [pointer, ctypes.c_int64, ctypes.POINTER(ctypes.c_int32)]
    library.trivet_cpu_map_cached_pages.restype = None
    library.trivet_cpu_dequantize.argtypes = [ctypes.c_char_p, pointer, ctypes.c_int64, pointer]
    library.trivet_cpu_dequantize.restype = ctypes.c_bool
    return library


def probe_cpu() -> dict[str, Any]:
    """What the library sees: features, tiers (name -> missing features), best_tier, num_threads (physical cores)."""
    described: dict[str, Any] = json.loads(_cpu_library().trivet_cpu_describe(None))
    return described


def select_tier(cpu_tier: str | None) -> str:
    """`cpu_tier`, else $TRIVET_CPU_TIER, else the best one; UnsupportedDeviceError names what the CPU lacks."""
    wanted = cpu_tier or os.environ.get(TIER_VARIABLE) or ""
    complaint = _cpu_library().trivet_cpu_check_tier(wanted.encode(), None).decode()
    if complaint:
        from_variable = not cpu_tier and wanted
        raise UnsupportedDeviceError(f"${TIER_VARIABLE}: {complaint}" if from_variable else complaint)
    return wanted or str(probe_cpu()["best_tier"])


def describe_cpu(cpu_tier: str | None = None) -> dict[str, Any]:
    """Facts for `trivet doctor`: library, features, tiers (available or what is missing), selected_tier, num_threads.

    `selected_tier` is None, with `selected_tier_error`, when `cpu_tier`, else $TRIVET_CPU_TIER, asks for what the CPU
    cannot do.
    """
    probed = probe_cpu()
    facts: dict[str, Any] = {
        "library": str(cpu_library_path()),
        "features": probed["features"],
        "tiers": {
            name: {"available": not missing, "missing_features": missing} for name, missing in probed["tiers"].items()
        },
        "num_threads": probed["num_threads"],
    }
    try:
        facts["selected_tier"] = select_tier(cpu_tier)
    except UnsupportedDeviceError as error:
        facts["selected_tier"] = None
        facts["selected_tier_error"] = str(error)
    return facts


def merge_byte_pairs(tables: BytePairTables, ids: list[int], words: NDArray[np.float64]) -> list[int]:
    """The tokens that BPE makes of `ids`, one per character; see cpu/byte_pairs.h for `words`."""
    import numpy as np

    merged = np.array(ids, np.uint32)
    count = _cpu_library().trivet_cpu_merge_byte_pairs(tables, merged.ctypes.data, words.ctypes.data, len(merged))
    if count < 0:
        raise MemoryError("no memory to tokenise with")
    found: list[int] = merged[:count].tolist()
    return found


def dequantize_rows(name: str, rows: NDArray[np.uint8], out: NDArray[np.float32]) -> NDArray[np.float32]:
    """`out` [rows, n] = rows [rows, row_bytes] of the weight format `name`, both C-contiguous.

    Bit for bit what exporters.dequantize computes; other threads run meanwhile. ValueError for another format or size.
    """
    if name not in FORMATS:
        raise ValueError(f"dequantize_rows: expected a weight format of {', '.join(FORMATS)}, got {name!r}")
    if not (rows.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError("dequantize_rows: expected C-contiguous arrays")
    if out.dtype != "float32" or rows.nbytes != FORMATS[name].row_bytes(out.size):
        raise ValueError(
            f"dequantize_rows: expected {name} blocks and as many float32, got {rows.nbytes} bytes for {out.size} "
            f"{out.dtype}"
        )
    if not _cpu_library().trivet_cpu_dequantize(name.encode(), rows.ctypes.data, out.size, out.ctypes.data):
        raise RuntimeError(f"dequantize_rows: {cpu_library_path()} knows no weight format {name!r}")
    return out


def map_cached_pages(arrays: Sequence[NDArray[np.uint8]], stop: ctypes.c_int32) -> None:
    """Touch the mapped files below `arrays` where the page cache holds them, in order; see cpu/cached_pages.h.

    Other threads run meanwhile; it ends early when one of them sets `stop` to another value than 0.
    """
    import numpy as np

    ranges = np.array([(array.ctypes.data, array.nbytes) for array in arrays], np.uintp)
    _cpu_library().trivet_cpu_map_cached_pages(ranges.ctypes.data, len(ranges), stop)
