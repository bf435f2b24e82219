"""ModelSession: a model package on a device, ready to run steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contract.manifest import GRAPH_NAME, Manifest
from .contract.opset import (
    GRAPH_INPUTS,
    KV_DTYPES,
    SESSION_ACTIVATION_DTYPE,
    SESSION_CPU_TIER,
    SESSION_NUM_THREADS,
)
from .errors import BackendError, InvalidInputError, KernelError, SessionCreateError, UnsupportedDeviceError
from .library import cpu_library_path, describe_cpu, probe_cpu, select_tier

if TYPE_CHECKING:
    import onnxruntime
    from numpy.typing import NDArray

    from .cuda.device import CudaDevice
    from .cuda.session import CudaSteps

__all__ = ["ModelSession", "describe_cpu"]

_ACTIVATION_DTYPES = ("auto", "int8", "float32")
_KV_INPUTS = ("kv_cache", "kv_layout")
_KV_OUTPUT = "kv_cache_out"


class ModelSession:
    """One onnxruntime session with its KV cache. Not safe for concurrent run() calls; two sessions are."""

    num_threads: int
    tier: str

    def __init__(
        self,
        package_dir: Path,
        manifest: Manifest,
        *,
        device: str = "cpu",
        num_threads: int | None = None,
        activation_dtype: str = "auto",
        cpu_tier: str | None = None,
        extra_outputs: Sequence[str] = (),
    ) -> None:
        """Load `package_dir`'s graph; weights are mapped from the files in `manifest.source_dir`.

        device: "cpu", "cuda" or "cuda:N". num_threads: None = the physical cores that this process may use; it and
        cpu_tier are for the CPU only. activation_dtype: "auto" is "int8".
        extra_outputs: names of inner tensors that run() returns as well (`layers.3.residual`).
        Raises BackendError subclasses.
        """
        if activation_dtype not in _ACTIVATION_DTYPES:
            raise InvalidInputError(f"activation_dtype {activation_dtype!r}: expected one of {_ACTIVATION_DTYPES}")
        if num_threads is not None and num_threads < 1:
            raise InvalidInputError(f"num_threads {num_threads}: expected 1 or more, or None")
        self._manifest = manifest
        self._cuda_device: CudaDevice | None = None
        self._cuda: CudaSteps | None = None
        if device == "cpu":
            self.tier = select_tier(cpu_tier)
            self.num_threads = num_threads if num_threads is not None else int(probe_cpu()["num_threads"])
        else:
            self._open_cuda(device, num_threads, cpu_tier)
        self._extra_outputs = tuple(extra_outputs)
        model = _graph_bytes(package_dir / GRAPH_NAME, self._extra_outputs)
        self._session = self._create(model, "int8" if activation_dtype == "auto" else activation_dtype)
        self._binding: Any = self._session.io_binding()
        if self._cuda_device is not None:
            from .cuda.session import CudaSteps

            self._cuda = CudaSteps(self._cuda_device, self._session)
        self._output_names = {output.name for output in self._session.get_outputs()}
        self._checks = _input_checks([i.name for i in self._session.get_inputs()])
        self._kv_values: tuple[Any, Any] | None = None

    def _open_cuda(self, device: str, num_threads: int | None, cpu_tier: str | None) -> None:
        from .cuda.device import CudaDevice, parse_device

        ordinal = parse_device(device)
        for name, value in (("num_threads", num_threads), ("cpu_tier", cpu_tier)):
            if value is not None:
                raise InvalidInputError(f"{name} {value!r}: applies to device 'cpu' only, the device is {device!r}")
        try:
            self._cuda_device = CudaDevice(ordinal)
        except UnsupportedDeviceError as error:
            raise UnsupportedDeviceError(f"device {device!r}: {error}") from error
        self.tier = f"cuda:{ordinal}"
        self.num_threads = 1  # the host only enqueues

    def _create(self, model: bytes, activation_dtype: str) -> onnxruntime.InferenceSession:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1  # the op library has its own pool
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # The exporter emits what is to run; rewriting passes would only cost start-up time.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_mem_pattern = False  # plans are kept per input shape, and every step has another shape
        options.log_severity_level = 4  # errors reach the caller as exceptions
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", self._manifest.source_dir
        )
        if self._cuda_device is not None:
            from .cuda.session import configure

            with _translated(SessionCreateError, f"cannot load the model on {self.tier}"):
                configure(self._cuda_device, options, activation_dtype)
                return ort.InferenceSession(model, options)
        entries = {
            SESSION_NUM_THREADS: str(self.num_threads),
            SESSION_ACTIVATION_DTYPE: activation_dtype,
            SESSION_CPU_TIER: self.tier,
        }
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        with _translated(SessionCreateError, "cannot load the model"):
            options.register_custom_ops_library(str(cpu_library_path()))
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def allocate_kv_cache(self, *, num_blocks: int, block_size: int, dtype: str) -> int:
        """Reserve zero-filled memory for `num_blocks` blocks and return its bytes; pages become resident on first use.

        dtype: a name of KV_DTYPES. May be called once.
        """
        import numpy as np
        import onnxruntime as ort

        if self._kv_values is not None or (self._cuda is not None and self._cuda.has_kv_cache):
            raise BackendError("allocate_kv_cache: this session has a KV cache already")
        if dtype not in KV_DTYPES:
            raise InvalidInputError(f"KV cache dtype {dtype!r}: expected one of {tuple(KV_DTYPES)}")
        if num_blocks < 1 or block_size < 1:
            raise InvalidInputError(f"num_blocks {num_blocks}, block_size {block_size}: expected 1 or more")
        code, element_bytes = KV_DTYPES[dtype]
        block_bytes = block_size * self._manifest.kv_elements_per_token * element_bytes
        layout_array = np.array([code, block_size], np.int32)
        if self._cuda is not None:
            self._cuda.allocate_kv_cache(num_blocks, block_bytes, layout_array)
            return num_blocks * block_bytes
        try:
            cache_memory = np.zeros((num_blocks, block_bytes), np.uint8)  # calloc: untouched pages cost nothing
        except MemoryError as error:
            raise BackendError(f"cannot reserve {num_blocks * block_bytes} bytes for the KV cache: {error}") from error
        value = ort.OrtValue.ortvalue_from_numpy(cache_memory)  # wraps the array's memory
        if value.data_ptr() != cache_memory.ctypes.data:
            raise BackendError("onnxruntime copied the KV cache instead of wrapping it: unsupported version")
        layout = ort.OrtValue.ortvalue_from_numpy(layout_array)
        self._kv_values = (value, layout)
        for name, bound in zip(_KV_INPUTS, self._kv_values, strict=True):
            self._binding.bind_ortvalue_input(name, bound)
        return num_blocks * block_bytes

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Run one step: all graph inputs but the KV cache's, C-contiguous; returns `outputs` and the extra outputs."""
        if self._kv_values is None and (self._cuda is None or not self._cuda.has_kv_cache):
            raise BackendError("run: call allocate_kv_cache first, and not after close")
        self._check_inputs(inputs)
        names = (*outputs, *self._extra_outputs)
        for name in names:
            if name not in self._output_names or name == _KV_OUTPUT:
                raise InvalidInputError(f"output {name!r}: the graph has {sorted(self._output_names - {_KV_OUTPUT})}")
        if self._cuda is not None:
            with _translated(KernelError, "step failed"):
                return self._cuda.run(inputs, names)
        assert self._kv_values is not None
        binding = self._binding._iobinding  # without the wrapper's per-call checks
        for name in self._checks:
            binding.bind_input(name, inputs[name])
        # Values of the last run stay bound until cleared, and onnxruntime would insist on their shapes.
        binding.clear_binding_outputs()
        binding.bind_ortvalue_output(_KV_OUTPUT, self._kv_values[0]._ortvalue)
        device = _cpu_device()
        for name in names:
            binding.bind_output(name, device)
        with _translated(KernelError, "step failed"):
            self._session._sess.run_with_iobinding(binding, None)
        values = binding.get_outputs()
        return {name: values[i].numpy() for i, name in enumerate(names, start=1)}

    def _check_inputs(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        sizes: dict[str, int] = {}
        for name, (dtype, shape) in self._checks.items():
            array = inputs.get(name)
            if array is None:
                raise InvalidInputError(f"input {name!r} is missing")
            if array.dtype != dtype or array.ndim != len(shape) or not array.flags.c_contiguous:
                raise InvalidInputError(
                    f"input {name!r}: expected C-contiguous {dtype} of shape {shape}, "
                    f"got {array.dtype} of shape {array.shape}"
                )
            for extent, wanted in zip(array.shape, shape, strict=True):
                expected = sizes.setdefault(wanted, extent) if isinstance(wanted, str) else wanted
                if extent != expected:
                    raise InvalidInputError(
                        f"input {name!r}: shape {array.shape} does not fit {shape}, {wanted} is {expected}"
                    )
        for symbol in ("R", "S"):
            count = sizes.get(symbol)
            if count is not None and sizes.get(f"{symbol}+1", count + 1) != count + 1:
                raise InvalidInputError(
                    f"inputs of extent {symbol}+1 = {sizes[f'{symbol}+1']} while {symbol} = {count}"
                )
        unknown = inputs.keys() - GRAPH_INPUTS.keys()
        if unknown:
            raise InvalidInputError(f"inputs {sorted(unknown)} are not graph inputs; known: {list(self._checks)}")

    def close(self) -> None:
        """Free the session and the KV cache; run() fails afterwards."""
        self._kv_values = None
        self._binding = None
        self._session = None
        if self._cuda_device is not None:
            if self._cuda is not None:
                self._cuda.close()
            self._cuda = None
            self._cuda_device.close()


def _graph_bytes(path: Path, extra_outputs: Sequence[str]) -> bytes:
    """The serialised graph, with `extra_outputs` made float32 graph outputs."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SessionCreateError(f"cannot read {path}: {error.strerror}") from error
    if not extra_outputs:
        return raw
    import onnx

    model = onnx.load_model_from_string(raw)
    known = {name for node in model.graph.node for name in node.output}
    for name in extra_outputs:
        if name not in known:
            raise InvalidInputError(f"extra output {name!r}: the graph of {path} has no such tensor")
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return bytes(model.SerializeToString())


def _input_checks(names: Sequence[str]) -> dict[str, tuple[Any, tuple[str | int, ...]]]:
    """dtype and shape per input that run() takes; SessionCreateError if the graph is not one of ours."""
    import numpy as np

    unknown = set(names) - GRAPH_INPUTS.keys()
    missing = set(_KV_INPUTS) - set(names)
    if unknown or missing:
        raise SessionCreateError(
            f"the graph's inputs are not those of this trivet (unknown {sorted(unknown)}, missing {sorted(missing)}): "
            "export the checkpoint again"
        )
    return {
        name: (np.dtype(dtype), shape)
        for name, (dtype, shape) in GRAPH_INPUTS.items()
        if name in names and name not in _KV_INPUTS
    }


@cache
def _cpu_device() -> Any:
    import onnxruntime as ort

    return ort.OrtDevice.make("cpu", 0)._get_c_device()


@cache
def _ort_exceptions() -> tuple[type[BaseException], ...]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = [value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*own, RuntimeError, ValueError)


@contextmanager
def _translated(error_type: type[BackendError], what: str) -> Iterator[None]:
    """The one place where onnxruntime's exceptions become ours."""
    try:
        yield
    except _ort_exceptions() as error:
        # The status text follows a fixed prefix; what the op says is the useful part.
        text = str(error).rpartition("Status Message: ")[2]
        raise error_type(f"{what}: {text}") from error


os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at onnxruntime's first import
