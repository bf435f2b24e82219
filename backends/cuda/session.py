"""A model package on a CUDA device: the device's half of backends.session.ModelSession."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..contract.opset import GRAPH_INPUTS, SAMPLING_FLOATS, SAMPLING_INTS, SESSION_ACTIVATION_DTYPE
from ..errors import DeviceMemoryError, InvalidInputError, SessionCreateError, UnsupportedDeviceError
from ..ort import KV_INPUTS, KV_OUTPUT, host_device, session_options, translated
from .device import MAX_CAPTURED_ROWS, CudaDevice, parse_device, probe_devices

if TYPE_CHECKING:
    import onnxruntime
    from numpy.typing import NDArray

    from ..session import SessionSettings

logger = logging.getLogger(__name__)

_TOKENS: Final = "sampled_token_ids"
_HOST_INPUTS: Final = ("kv_layout", "max_num_logprobs")  # kernels read these on the host
_ALIGNMENT: Final = 256  # bytes, of an input in the staging memory
_MIN_TABLE_WIDTH: Final = 16  # blocks
_CONSTANTS: Final = ("query_start_loc", "logits_indices")  # of decode steps of one size
_LISTS: Final = ("token_history", "allowed_token_ids", "banned_token_ids", "bias_token_ids", "bitmask")
_EAGER: Final = "-1"  # gpu_graph_id of a run that is not captured

# A row that pads a decode step: a token at position 0 that reads the null block, writes nothing, is sampled greedily.
_PADDING_FLOATS: Final = {"top_p": 1.0, "repetition_penalty": 1.0}
_PADDING_INTS: Final = {"num_logprobs": -1, "forced_token_id": -1}


def padded_size(num_rows: int) -> int:
    """The size of the captured step that takes `num_rows` decoding requests: 1, 2, 4, 8, then multiples of 8."""
    for size in (1, 2, 4, 8):
        if num_rows <= size:
            return size
    return -(-num_rows // 8) * 8


class _Staging:
    """Host and device memory of one layout: inputs are written into the host half and go over in one copy."""

    def __init__(self, device: CudaDevice, shapes: Mapping[str, tuple[int, ...]]) -> None:
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(GRAPH_INPUTS[name][0]).itemsize
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end
        self.offsets = offsets
        self.shapes = dict(shapes)
        self._device = device
        self.address = device.allocate(max(end, 1))
        try:
            self._host = device.pinned(end)
            self._host_address = int(self._host.ctypes.data)
        except BaseException:
            device.release(self.address)
            raise
        self.arrays: dict[str, NDArray[Any]] = {}
        for name, shape in shapes.items():
            dtype = np.dtype(GRAPH_INPUTS[name][0])
            count = int(np.prod(shape, dtype=np.int64))
            raw = self._host[offsets[name] : offsets[name] + count * dtype.itemsize]
            self.arrays[name] = raw.view(dtype).reshape(shape)

    def upload(self) -> None:
        self._device.copy(self.address, self._host_address, self.num_bytes)

    def free(self) -> None:
        self._device.release(self.address)
        self.arrays.clear()
        self._device.release_pinned(self._host)


class _DecodeStep:
    """A step of `size` rows with one token each, sampled without lists: captured once, replayed with new inputs."""

    def __init__(
        self,
        device: CudaDevice,
        size: int,
        width: int,
        names: Sequence[str],
        kv: Mapping[str, Any],
        binding: Any,
        graph_id: int,
    ) -> None:
        import onnxruntime as ort

        self.size, self._device, self.binding = size, device, binding
        shapes = {n: _shape(n, size, width) for n in names if n not in KV_INPUTS and n not in _HOST_INPUTS}
        with ExitStack() as undo:  # a step that does not come about takes no memory
            self._staging = _Staging(device, shapes)
            undo.callback(self._staging.free)
            self._tokens = device.pinned(size * 4).view(np.int32)  # where the last kernel writes them
            undo.pop_all()
        self._no_logprobs = ort.OrtValue.ortvalue_from_numpy(np.array(0, np.int32))
        padding = _padding_arrays(shapes, size)
        for name, array in self._staging.arrays.items():
            array[...] = padding[name]
        self._block_table = self._staging.arrays["block_table"]
        self._varying = [
            (name, array, padding[name])
            for name, array in self._staging.arrays.items()
            if array.size and name != "block_table" and name not in _CONSTANTS
        ]
        self.runs = 0
        self.options = _run_options(str(graph_id), synchronize=False)
        self.eager_options = _run_options(_EAGER, synchronize=False)
        on_device = device.ort_device()
        for name, array in self._staging.arrays.items():
            address = self._staging.address + self._staging.offsets[name]
            binding.bind_input(name, on_device, array.dtype.type, array.shape, address)
        binding.bind_ortvalue_input("max_num_logprobs", self._no_logprobs._ortvalue)
        bind_kv(binding, device, kv)
        binding.bind_output(_TOKENS, on_device, np.int32, (size,), self._tokens.ctypes.data)

    def run(self, session: onnxruntime.InferenceSession, inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        rows = len(inputs["input_ids"])
        for name, target, padding in self._varying:
            source = inputs[name]
            target[: len(source)] = source
            if rows < self.size:
                target[len(source) :] = padding[len(source) :]
        table = inputs["block_table"]
        self._block_table[:rows, : table.shape[1]] = table
        self._block_table[:rows, table.shape[1] :] = 0
        self._block_table[rows:] = 0
        self._staging.upload()
        # The first run loads kernels and grows scratch, which a capture had better not see; steps repeat without harm.
        options = self.eager_options if self.runs == 0 else self.options
        session._sess.run_with_iobinding(self.binding, options)
        self.runs += 1
        self._device.finish()
        return self._tokens[:rows].copy()


class CudaSession:
    """A DeviceSession (backends/session.py): decode steps are captured as CUDA graphs, other steps run eagerly."""

    def __init__(self, model: bytes, settings: SessionSettings) -> None:
        """Raises BackendError subclasses; UnsupportedDeviceError when there is no such device or no kernels for it."""
        ordinal = parse_device(settings.device)
        for name, value in (("num_threads", settings.num_threads), ("cpu_tier", settings.cpu_tier)):
            if value is not None:
                raise InvalidInputError(
                    f"{name} {value!r}: applies to device 'cpu' only, the device is {settings.device!r}"
                )
        try:
            self._device = CudaDevice(ordinal)
        except UnsupportedDeviceError as error:
            raise UnsupportedDeviceError(f"device {settings.device!r}: {error}") from error
        self.tier = f"cuda:{ordinal}"
        self.num_threads = 1  # the host only enqueues
        self._session: Any = None
        try:
            with translated(SessionCreateError, f"cannot load the model on {self.tier}"):
                self._session = _create(self._device, model, settings)
            self._device.end_upload()
        except BaseException as error:
            refusal = self._device.take_refusal()
            self._device.close()
            if refusal:
                raise DeviceMemoryError(f"cannot load the model on {self.tier}: {refusal}") from error
            raise
        self.input_names = [value.name for value in self._session.get_inputs()]
        self.output_names = [value.name for value in self._session.get_outputs()]
        self._kv: dict[str, Any] | None = None
        self._decode: dict[tuple[int, int], _DecodeStep] = {}
        self._eager_options = _run_options(_EAGER, synchronize=True)

    def allocate_kv_cache(self, num_blocks: int, layer_bytes: Sequence[int], layout: NDArray[np.int32]) -> None:
        import onnxruntime as ort

        block_bytes = sum(layer_bytes)
        address = self._device.allocate(num_blocks * block_bytes)
        self._device.fill(address, 0, num_blocks * block_bytes)
        self._device.finish()
        self._kv = {
            "address": address,
            "shape": (num_blocks, block_bytes),
            "layout": ort.OrtValue.ortvalue_from_numpy(layout),
        }

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert self._kv is not None
        address, (_, block_bytes) = self._kv["address"], self._kv["shape"]
        for source, target in copies:
            self._device.copy(address + target * block_bytes, address + source * block_bytes, block_bytes)

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        try:
            return self._run(inputs, outputs)
        except Exception as error:
            refusal = self._device.take_refusal()
            if not refusal:
                raise
            self._device.finish()  # what the step has begun; raises if the device itself is lost
            raise DeviceMemoryError(f"step failed: {refusal}") from error

    def _run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        assert self._kv is not None
        if tuple(outputs) == (_TOKENS,) and self._is_decode(inputs):
            return {_TOKENS: self._decode_step(inputs).run(self._session, inputs)}
        binding: Any = self._session.io_binding()._iobinding
        for name in self.input_names:
            if name not in KV_INPUTS:
                binding.bind_input(name, inputs[name])
        bind_kv(binding, self._device, self._kv)
        for name in outputs:
            binding.bind_output(name, host_device())
        self._session._sess.run_with_iobinding(binding, self._eager_options)
        values = binding.get_outputs()
        return {name: values[i].numpy() for i, name in enumerate(outputs, start=1)}

    def _is_decode(self, inputs: Mapping[str, NDArray[Any]]) -> bool:
        rows = len(inputs["input_ids"])
        if rows == 0 or rows > MAX_CAPTURED_ROWS or inputs["max_num_logprobs"] != 0:
            return False
        if len(inputs["seq_lens"]) != rows or len(inputs["logits_indices"]) != rows:
            return False
        if any(inputs[name].size for name in _LISTS):
            return False
        one_each = np.arange(rows + 1, dtype=np.int32)
        return bool(
            (inputs["query_start_loc"] == one_each).all() and (inputs["logits_indices"] == one_each[:rows]).all()
        )

    def _decode_step(self, inputs: Mapping[str, NDArray[Any]]) -> _DecodeStep:
        assert self._kv is not None
        size = padded_size(len(inputs["input_ids"]))
        width = _MIN_TABLE_WIDTH
        while width < inputs["block_table"].shape[1]:
            width *= 2
        step = self._decode.get((size, width))
        if step is None:
            binding = self._session.io_binding()._iobinding
            step = _DecodeStep(self._device, size, width, self.input_names, self._kv, binding, len(self._decode))
            self._decode[size, width] = step
        return step

    def interrupt(self) -> None:
        """A step is short."""

    def close(self) -> None:
        self._decode.clear()
        self._kv = None
        self._session = None
        self._device.close()


def _create(device: CudaDevice, model: bytes, settings: SessionSettings) -> onnxruntime.InferenceSession:
    """A session on `device` that captures, and that fails rather than fall back to the CPU."""
    import onnxruntime as ort

    facts = probe_devices()
    chosen = next(d for d in facts["devices"] if d["ordinal"] == device.ordinal)
    logger.info(
        "Device cuda:%d is %s (SM %d), kernels of SM %s, %s activations, steps of up to %d decoding requests captured",
        device.ordinal,
        chosen["name"],
        chosen["sm"],
        chosen["kernels"],
        settings.activation_dtype,
        MAX_CAPTURED_ROWS,
    )
    options = session_options(settings.source_dir)
    options.add_session_config_entry(SESSION_ACTIVATION_DTYPE, settings.activation_dtype)
    device.add_to(options, capture=True)
    settings.meanwhile()
    session = ort.InferenceSession(model, options)
    session.disable_fallback()
    return session


def bind_kv(binding: Any, device: CudaDevice, kv: Mapping[str, Any]) -> None:
    """The KV cache as input and, in place, as the first output; its layout from host memory."""
    on_device = device.ort_device()
    binding.bind_input("kv_cache", on_device, np.uint8, kv["shape"], kv["address"])
    binding.bind_ortvalue_input("kv_layout", kv["layout"]._ortvalue)
    binding.bind_output(KV_OUTPUT, on_device, np.uint8, kv["shape"], kv["address"])


def _run_options(graph_id: str, *, synchronize: bool) -> Any:
    import onnxruntime as ort

    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph_id)
    if not synchronize:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def _shape(name: str, size: int, width: int) -> tuple[int, ...]:
    """Shape of a graph input in a decode step of `size` rows; lists are empty."""
    extents = {"T": size, "R": size, "S": size, "R+1": size + 1, "S+1": size + 1, "max_blocks": width}
    return tuple(dim if isinstance(dim, int) else extents.get(dim, 0) for dim in GRAPH_INPUTS[name][1])


def _padding_arrays(shapes: Mapping[str, tuple[int, ...]], size: int) -> dict[str, NDArray[Any]]:
    arrays = {name: np.zeros(shape, GRAPH_INPUTS[name][0]) for name, shape in shapes.items()}
    arrays["slot_mapping"][:] = -1
    arrays["seq_lens"][:] = 1
    arrays["query_start_loc"][:] = np.arange(size + 1)
    arrays["logits_indices"][:] = np.arange(size)
    for name, value in _PADDING_FLOATS.items():
        arrays["sampling_floats"][:, SAMPLING_FLOATS.index(name)] = value
    for name, whole in _PADDING_INTS.items():
        arrays["sampling_ints"][:, SAMPLING_INTS.index(name)] = whole
    return arrays
