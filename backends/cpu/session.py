"""A model package on the CPU: the device's half of backends.session.ModelSession."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..contract.opset import SESSION_ACTIVATION_DTYPE, SESSION_CPU_TIER, SESSION_NUM_THREADS
from ..errors import BackendError, SessionCreateError
from ..library import cpu_library_path, probe_cpu, select_tier
from ..ort import KV_INPUTS, KV_OUTPUT, host_device, session_options, translated
from .external_data import external_tensors
from .weight_files import WeightFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..session import SessionSettings

# A huge page that is touched is resident as a whole, and each layer's part of the cache ends within one. From so many
# bytes on, of a token in a layer, it holds 1024 tokens or fewer.
_HUGE_PAGE_TOKEN_BYTES: Final = 2048


class CpuSession:
    """A DeviceSession (backends/session.py) whose KV cache is an anonymous map."""

    def __init__(self, model: bytes, settings: SessionSettings) -> None:
        """num_threads None = the physical cores that this process may use. Raises BackendError subclasses."""
        self.tier = select_tier(settings.cpu_tier)
        self.num_threads = settings.num_threads or int(probe_cpu()["num_threads"])
        self._weight_values: list[tuple[Any, NDArray[np.uint8]]] = []  # the session refers to them
        self._weights = WeightFiles([Path(settings.source_dir) / name for name in settings.source_names])
        try:
            with translated(SessionCreateError, "cannot load the model"):
                weights = [(tensor, self._weights.array(tensor)) for tensor in external_tensors(model)]
            self._weights.map_ahead([array for tensor, array in weights if not tensor.is_looked_up])
            self._session = self._open(model, settings, {tensor.name: array for tensor, array in weights})
        except BaseException:
            self._weights.close()
            raise
        import onnxruntime as ort

        self.input_names = [value.name for value in self._session.get_inputs()]
        self.output_names = [value.name for value in self._session.get_outputs()]
        self._step_inputs = [name for name in self.input_names if name not in KV_INPUTS]
        self._binding: Any = self._session.io_binding()
        self._bound_inputs: Mapping[str, NDArray[Any]] = {}
        self._bound_outputs: tuple[str, ...] = ()
        self._results: dict[str, NDArray[Any]] = {}  # of the outputs that are bound: onnxruntime writes to them again
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = 4
        self._kv_values: tuple[Any, Any] | None = None
        self._kv_layers: list[NDArray[np.uint8]] = []  # [num_blocks, bytes], views of the cache

    def _open(self, model: bytes, settings: SessionSettings, weights: Mapping[str, NDArray[np.uint8]]) -> Any:
        import onnxruntime as ort

        options = session_options(settings.source_dir)
        entries = {
            SESSION_NUM_THREADS: str(self.num_threads),
            SESSION_ACTIVATION_DTYPE: settings.activation_dtype,
            SESSION_CPU_TIER: self.tier,
        }
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        with translated(SessionCreateError, "cannot load the model"):
            options.register_custom_ops_library(str(cpu_library_path()))
            for name, array in weights.items():
                value = _wrapped(array, f"weight {name!r}")
                options.add_initializer(name, value)
                self._weight_values.append((value, array))
            settings.meanwhile()
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def allocate_kv_cache(self, num_blocks: int, layer_bytes: Sequence[int], layout: NDArray[np.int32]) -> None:
        import onnxruntime as ort

        block_bytes = sum(layer_bytes)
        layer_token_bytes = block_bytes // len(layer_bytes) // int(layout[1])  # layout: KV dtype, block_size
        try:
            memory = _zeros(num_blocks * block_bytes, huge_pages=layer_token_bytes >= _HUGE_PAGE_TOKEN_BYTES)
            cache_memory = memory.reshape(num_blocks, block_bytes)
        except (OSError, OverflowError) as error:
            raise BackendError(f"cannot reserve {num_blocks * block_bytes} bytes for the KV cache: {error}") from error
        value = _wrapped(cache_memory, "the KV cache")
        self._kv_values = (value, ort.OrtValue.ortvalue_from_numpy(layout))
        for name, bound in zip(KV_INPUTS, self._kv_values, strict=True):
            self._binding.bind_ortvalue_input(name, bound)
        ends = num_blocks * np.cumsum(layer_bytes)
        layers = np.split(cache_memory.reshape(-1), ends[:-1])
        self._kv_layers = [layer.reshape(num_blocks, -1) for layer in layers]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for layer in self._kv_layers:
            for source, target in copies:
                layer[target] = layer[source]

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Inputs that are arrays of the last run stay bound; if all are, its results are overwritten."""
        self._weights.check()
        binding = self._binding._iobinding  # without the wrapper's per-call checks
        names = tuple(outputs)
        if inputs is not self._bound_inputs or names != self._bound_outputs:
            self._bind(inputs, names)
        self._session._sess.run_with_iobinding(binding, self._run_options)
        if not self._results:
            values = binding.get_outputs()
            self._results = {name: values[i].numpy() for i, name in enumerate(names, start=1)}
        return dict(self._results)

    def _bind(self, inputs: Mapping[str, NDArray[Any]], outputs: tuple[str, ...]) -> None:
        self._results = {}
        binding, known = self._binding._iobinding, self._bound_inputs
        self._bound_inputs = {}  # until all are bound
        for name in self._step_inputs:
            if known.get(name) is not inputs[name]:
                binding.bind_input(name, inputs[name])
        self._bind_outputs(outputs)
        self._bound_inputs = inputs

    def _bind_outputs(self, names: tuple[str, ...]) -> None:
        """Onnxruntime insists on the shapes of outputs that are bound already."""
        assert self._kv_values is not None
        binding = self._binding._iobinding
        binding.clear_binding_outputs()
        binding.bind_ortvalue_output(KV_OUTPUT, self._kv_values[0]._ortvalue)
        host = host_device()
        for name in names:
            binding.bind_output(name, host)
        self._bound_outputs = names

    def interrupt(self) -> None:
        self._run_options.terminate = True

    def close(self) -> None:
        self._kv_layers = []
        self._kv_values = None
        self._binding = None
        self._bound_inputs, self._results = {}, {}
        self._session = None
        self._weight_values.clear()
        self._weights.close()


def _wrapped(array: NDArray[np.uint8], what: str) -> Any:
    """An OrtValue over the array's memory, which must outlive it; BackendError if onnxruntime copies instead."""
    import onnxruntime as ort

    value = ort.OrtValue.ortvalue_from_numpy(array)
    if value.data_ptr() != array.ctypes.data:
        raise BackendError(f"onnxruntime copied {what} instead of wrapping it: unsupported version")
    return value


def _zeros(size: int, *, huge_pages: bool) -> NDArray[np.uint8]:
    """Zeroed memory that begins with a page; pages that are never touched cost nothing."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size, **private)
    advice = "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE"
    if hasattr(mmap, advice):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(getattr(mmap, advice))
    return np.frombuffer(memory, np.uint8)
