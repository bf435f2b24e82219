"""single_op.run_op on a CUDA device: arguments in device memory, guard bands around all that the op may write."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from trivet.backends.contract.opset import OPS, SESSION_ACTIVATION_DTYPE
from trivet.backends.cuda.device import CudaDevice

Array = NDArray[Any]
GUARD_BYTES = 256
GUARD_VALUE = 0xA5
HOST_INPUTS = ("kv_layout", "max_num_logprobs")  # kernels read these on the host


@lru_cache(maxsize=1)
def device() -> CudaDevice:
    return CudaDevice(0)


@lru_cache(maxsize=256)
def _session(model: bytes, activation_dtype: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.enable_mem_pattern = False
    options.add_session_config_entry(SESSION_ACTIVATION_DTYPE, activation_dtype)
    device().add_to(options, capture=False)
    session = ort.InferenceSession(model, options)
    session.disable_fallback()
    return session


class _Guarded:
    """Device memory for an array, with margins that must not change."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.num_bytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self._whole = device().allocate(self.num_bytes + 2 * GUARD_BYTES)
        device().fill(self._whole, GUARD_VALUE, self.num_bytes + 2 * GUARD_BYTES)
        self.address = self._whole + GUARD_BYTES

    def set(self, value: Array) -> None:
        device().copy(self.address, value.ctypes.data, self.num_bytes)
        device().finish()

    def read(self, name: str) -> Array:
        """Copy to the host after checking the margins, and free."""
        raw = np.empty(self.num_bytes + 2 * GUARD_BYTES, np.uint8)
        device().copy(raw.ctypes.data, self._whole, raw.nbytes)
        device().finish()
        margins = np.concatenate([raw[:GUARD_BYTES], raw[GUARD_BYTES + self.num_bytes :]])
        assert (margins == GUARD_VALUE).all(), f"{name}: the op wrote outside its memory"
        return np.array(raw[GUARD_BYTES : GUARD_BYTES + self.num_bytes].view(self.dtype).reshape(self.shape))

    def free(self) -> None:
        device().release(self._whole)


def run_on_device(
    model: bytes,
    op: str,
    inputs: Mapping[str, Array],
    *,
    outputs: Mapping[str, tuple[int, ...]],
    output_dtypes: Mapping[str, str],
    activation_dtype: str,
    aliases: Mapping[str, str],
) -> dict[str, Array]:
    """Run the one node of `model`; arguments as in single_op.run_op."""
    session = _session(model, activation_dtype)
    binding: Any = session.io_binding()._iobinding
    on_device = device().ort_device()
    on_host = ort.OrtDevice.make("cpu", 0)._get_c_device()
    memory = {name: _Guarded(shape, output_dtypes.get(name, "float32")) for name, shape in outputs.items()}
    sources = {source: output for output, source in aliases.items()}
    held: list[_Guarded] = list(memory.values())
    try:
        for name, value in inputs.items():
            if name in HOST_INPUTS:
                binding.bind_input(name, on_host, value.dtype.type, value.shape, value.ctypes.data)
                continue
            place = memory[sources[name]] if name in sources else _Guarded(value.shape, value.dtype)
            held.append(place)
            place.set(value)
            binding.bind_input(name, on_device, value.dtype.type, value.shape, place.address)
        for name in OPS[op].outputs:
            place = memory[name]
            binding.bind_output(name, on_device, place.dtype.type, place.shape, place.address)
        session._sess.run_with_iobinding(binding, None)
        return {name: place.read(name) for name, place in memory.items()}
    finally:
        for place in {id(p): p for p in held}.values():
            place.free()
