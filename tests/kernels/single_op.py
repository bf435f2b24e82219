"""Run one op of the domain `ai.trivet` on arrays, with guard bands around everything that the op may write."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper
from trivet.backends.contract.opset import (
    DOMAIN,
    OPS,
    OPSET_VERSION,
    SESSION_ACTIVATION_DTYPE,
    SESSION_CPU_TIER,
    SESSION_NUM_THREADS,
)
from trivet.backends.library import cpu_library_path

Array = NDArray[Any]

GUARD_BYTES = 256  # on each side; a multiple of the alignment that kernels may assume
GUARD_VALUE = 0xA5
CUDA_TIER = "cuda"
OUTPUT_DTYPES: dict[str, str] = {  # all others are float32
    "kv_cache_out": "uint8",
    "sampled_token_ids": "int32",
    "sampled_ranks": "int32",
    "top_token_ids": "int32",
}


def library_path() -> Path:
    """The op library under test: `TRIVET_CPU_LIBRARY` (a sanitizer build, say), else the one built in place."""
    override = os.environ.get("TRIVET_CPU_LIBRARY")
    return Path(override) if override else cpu_library_path()


def available_tiers() -> list[str]:
    """Tiers that this machine can run, lowest first; $TRIVET_KERNEL_TIERS = cuda: the CUDA device instead."""
    if os.environ.get("TRIVET_KERNEL_TIERS") == CUDA_TIER:
        return [CUDA_TIER]
    library = ctypes.CDLL(str(library_path()))
    library.trivet_cpu_describe.restype = ctypes.c_char_p
    library.trivet_cpu_describe.argtypes = [ctypes.c_char_p]
    described = json.loads(library.trivet_cpu_describe(None))
    return [name for name, missing in described["tiers"].items() if not missing]


class Guarded:
    """An array of `shape` inside a larger buffer whose margins must not change."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        raw = np.full(nbytes + 2 * GUARD_BYTES + 64, GUARD_VALUE, np.uint8)
        start = -raw.ctypes.data % 64
        self._buffer = raw[start : start + nbytes + 2 * GUARD_BYTES]
        self.array: Array = self._buffer[GUARD_BYTES : GUARD_BYTES + nbytes].view(dtype).reshape(shape)

    def check(self, name: str) -> None:
        margins = np.concatenate([self._buffer[:GUARD_BYTES], self._buffer[len(self._buffer) - GUARD_BYTES :]])
        assert (margins == GUARD_VALUE).all(), f"{name}: the op wrote outside its memory"


def _signature(given: Mapping[str, Array]) -> tuple[tuple[str, str, int], ...]:
    return tuple((name, value.dtype.name, value.ndim) for name, value in given.items())


@lru_cache(maxsize=256)
def _model(op: str, inputs: tuple[tuple[str, str, int], ...], attributes: str) -> bytes:
    schema = OPS[op]
    present = {name: (dtype, rank) for name, dtype, rank in inputs}
    names = [n.rstrip("?") for n in schema.inputs]
    unknown = present.keys() - set(names)
    assert not unknown, f"{op} has no inputs {unknown}"
    node = helper.make_node(
        op,
        [n if n in present else "" for n in names],
        list(schema.outputs),
        domain=DOMAIN,
        name="under_test",
        **json.loads(attributes),
    )
    graph_inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(d)), [None] * rank)
        for n, (d, rank) in present.items()
    ]
    graph_outputs = [
        helper.make_tensor_value_info(
            n, helper.np_dtype_to_tensor_dtype(np.dtype(OUTPUT_DTYPES.get(n, "float32"))), None
        )
        for n in schema.outputs
    ]
    model = helper.make_model(
        helper.make_graph([node], "single_op", graph_inputs, graph_outputs),
        opset_imports=[helper.make_opsetid(DOMAIN, OPSET_VERSION), helper.make_opsetid("", 18)],
        ir_version=10,
    )
    serialized: bytes = model.SerializeToString()
    return serialized


@lru_cache(maxsize=256)
def _session(model: bytes, tier: str, threads: int, activation_dtype: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry(SESSION_CPU_TIER, tier)
    options.add_session_config_entry(SESSION_NUM_THREADS, str(threads))
    options.add_session_config_entry(SESSION_ACTIVATION_DTYPE, activation_dtype)
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def bound_op(
    op: str,
    inputs: Mapping[str, Array | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    outputs: Mapping[str, tuple[int, ...]],
    tier: str,
    num_threads: int = 2,
    activation_dtype: str = "int8",
    aliases: Mapping[str, str] | None = None,
) -> tuple[Callable[[], None], dict[str, Guarded]]:
    """A call that runs `op` on bound memory, and its outputs by name. See run_op for the arguments."""
    given = {name: np.require(value, requirements="C") for name, value in inputs.items() if value is not None}
    model = _model(op, _signature(given), json.dumps(dict(attributes or {})))
    session = _session(model, tier, num_threads, activation_dtype)
    guarded = {name: Guarded(shape, OUTPUT_DTYPES.get(name, "float32")) for name, shape in outputs.items()}
    for output, source in (aliases or {}).items():
        guarded[output].array[...] = given[source]
        given[source] = guarded[output].array
    binding = session.io_binding()
    for name, value in given.items():
        binding.bind_input(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
    for name in OPS[op].outputs:
        value = guarded[name].array
        binding.bind_output(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)

    def call(_alive: object = (given, guarded)) -> None:
        session.run_with_iobinding(binding)

    return call, guarded


def run_op(
    op: str,
    inputs: Mapping[str, Array | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    outputs: Mapping[str, tuple[int, ...]],
    tier: str,
    num_threads: int = 2,
    activation_dtype: str = "int8",
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Array]:
    """Run `op` and return copies of its outputs.

    `outputs` gives the shape of every output, in any order. `aliases` maps an output to the input whose memory it
    shares (a guarded copy; the caller's array is not written). Optional inputs may be None. Tier "cuda" runs the op on
    the first CUDA device.
    """
    if tier == CUDA_TIER:
        from ..cuda.device_op import run_on_device

        given = {name: np.require(value, requirements="C") for name, value in inputs.items() if value is not None}
        return run_on_device(
            _model(op, _signature(given), json.dumps(dict(attributes or {}))),
            op,
            given,
            outputs=outputs,
            output_dtypes=OUTPUT_DTYPES,
            activation_dtype=activation_dtype,
            aliases=aliases or {},
        )
    call, guarded = bound_op(
        op,
        inputs,
        attributes,
        outputs=outputs,
        tier=tier,
        num_threads=num_threads,
        activation_dtype=activation_dtype,
        aliases=aliases,
    )
    call()
    for name, guard in guarded.items():
        guard.check(name)
    return {name: guard.array.copy() for name, guard in guarded.items()}


__all__ = ["GUARD_BYTES", "Guarded", "available_tiers", "bound_op", "library_path", "run_op"]
