"""ModelSession: a model package on a device, ready to run steps.

Here is what holds on every device: the package's graph, the checks of arguments and inputs. What differs is a
DeviceSession: cpu/session.py, cuda/session.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from .contract.manifest import GRAPH_NAME, Manifest
from .contract.opset import GRAPH_INPUTS, KV_DTYPES
from .devices import DeviceKVCache, open_device_session
from .errors import BackendError, InvalidInputError, KernelError, SessionCreateError
from .library import describe_cpu
from .ort import KV_INPUTS, KV_OUTPUT, translated

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DeviceSession", "ModelSession", "SessionSettings", "describe_cpu"]

_ACTIVATION_DTYPES = ("auto", "int8", "float32")


class SessionSettings(msgspec.Struct, frozen=True):
    """What a DeviceSession is opened with. A setting that the device does not have is refused there, by name."""

    device: str  # "cpu", "cuda" or "cuda:N"
    source_dir: str  # folder of the checkpoint files that the graph's external data points into
    source_names: tuple[str, ...]  # of these files
    activation_dtype: str  # "int8" or "float32"
    num_threads: int | None  # None = the device's own choice
    cpu_tier: str | None  # None = the best one
    meanwhile: Callable[[], None]  # see ModelSession


class DeviceSession(Protocol):
    """One onnxruntime session with its KV cache on one device. Its caller, ModelSession, has checked all arguments.

    A class of this kind is made from the serialised graph and SessionSettings; it raises BackendError subclasses and
    leaves nothing behind then.
    """

    tier: str  # the CPU's kernel tier, or the name of the device
    num_threads: int  # of the host that compute
    input_names: list[str]  # of the graph
    output_names: list[str]

    def allocate_kv_cache(self, num_blocks: int, layer_bytes: Sequence[int], layout: NDArray[np.int32]) -> None:
        """Zero-filled memory; `layer_bytes`: of a block, in each layer; `layout`: the graph input. Called once."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Whole KV blocks (from, to), in order, before what run() does next."""

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """All graph inputs but the KV cache's -> `outputs` in host memory. Lets onnxruntime's exceptions through.

        A mapping object of the last run has the array objects that it had then.
        """

    def interrupt(self) -> None:
        """See ModelSession."""

    def close(self) -> None:
        """Free the session, its KV cache and the device."""


class ModelSession:
    """A model package with its KV cache. Not safe for concurrent run() calls; two sessions are."""

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
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Load `package_dir`'s graph; weights are mapped from the files in `manifest.source_dir`.

        device: "cpu", "cuda" or "cuda:N". num_threads: None = the physical cores that this process may use; it and
        cpu_tier are for the CPU only. activation_dtype: "auto" is "int8".
        extra_outputs: names of inner tensors that run() returns as well (`layers.3.residual`); that of
            the last layer has the sampled rows only.
        meanwhile: called once, when what is left to do is nearly all native: starts work for another thread.
        Raises BackendError subclasses.
        """
        if activation_dtype not in _ACTIVATION_DTYPES:
            raise InvalidInputError(f"activation_dtype {activation_dtype!r}: expected one of {_ACTIVATION_DTYPES}")
        if num_threads is not None and num_threads < 1:
            raise InvalidInputError(f"num_threads {num_threads}: expected 1 or more, or None")
        self._manifest = manifest
        self._extra_outputs = tuple(extra_outputs)
        settings = SessionSettings(
            device=device,
            source_dir=manifest.source_dir,
            source_names=tuple(source.name for source in manifest.sources),
            activation_dtype="int8" if activation_dtype == "auto" else activation_dtype,
            num_threads=num_threads,
            cpu_tier=cpu_tier,
            meanwhile=meanwhile,
        )
        self._device_name = device
        self._device = open_device_session(_graph_bytes(package_dir / GRAPH_NAME, self._extra_outputs), settings)
        try:
            self._checks = _input_checks(self._device.input_names)
        except BaseException:
            self._device.close()
            raise
        self.tier, self.num_threads = self._device.tier, self._device.num_threads
        self._outputs = set(self._device.output_names) - {KV_OUTPUT}
        self._checked: dict[str, NDArray[Any]] = {}  # inputs of the last run
        # Names and ids of their arrays, which live on; None = nothing has been checked.
        self._places: tuple[list[str], list[int]] | None = None
        self._has_kv_cache, self._num_blocks = False, 0
        self._closed = False

    def allocate_kv_cache(self, *, num_blocks: int, block_size: int, dtype: str) -> int:
        """Reserve zero-filled memory for `num_blocks` blocks and return its bytes.

        dtype: a name of KV_DTYPES. May be called once. On the CPU, pages become resident on first use.
        """
        import numpy as np

        if self._has_kv_cache or self._closed:
            raise BackendError("allocate_kv_cache: this session has a KV cache already, or was closed")
        if dtype not in KV_DTYPES:
            raise InvalidInputError(f"KV cache dtype {dtype!r}: expected one of {tuple(KV_DTYPES)}")
        if num_blocks < 1 or block_size < 1:
            raise InvalidInputError(f"num_blocks {num_blocks}, block_size {block_size}: expected 1 or more")
        cpu_tier = self.tier if self._device_name == "cpu" else None
        DeviceKVCache(self._device_name, cpu_tier, self._manifest.kv_cache, block_size).checked(dtype)
        kv_dtype = KV_DTYPES[dtype]
        specs = sorted(self._manifest.kv_cache, key=lambda spec: spec.kv_offset)
        layer_bytes = [spec.bytes_per_token(kv_dtype) * block_size for spec in specs]
        self._device.allocate_kv_cache(num_blocks, layer_bytes, np.array([kv_dtype.code, block_size], np.int32))
        self._has_kv_cache, self._num_blocks = True, num_blocks
        return num_blocks * sum(layer_bytes)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks, each (from, to), in this order; the next run() finds them copied."""
        if not self._has_kv_cache or self._closed:
            raise BackendError("copy_blocks: call allocate_kv_cache first, and not after close")
        for block_id in {block_id for copy in copies for block_id in copy}:
            if not 0 < block_id < self._num_blocks:
                raise InvalidInputError(f"copy_blocks: block {block_id}; expected 1 to {self._num_blocks - 1}")
        with translated(KernelError, "copying KV blocks failed"):
            self._device.copy_blocks(copies)

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Run one step: all graph inputs but the KV cache's, C-contiguous; returns `outputs` and the extra outputs.

        An array object that was an input of the last run costs less: it is neither checked nor bound anew. The results
        may lie in the session's memory: they are good until the next run.

        Raises InvalidInputError, KernelError, DeviceMemoryError, CheckpointChangedError.
        """
        if not self._has_kv_cache or self._closed:
            raise BackendError("run: call allocate_kv_cache first, and not after close")
        places = [*inputs], [*map(id, inputs.values())]
        if places != self._places:
            self._places = None
            self._check_inputs(inputs)
            self._checked, self._places = dict(inputs), places
        names = (*outputs, *self._extra_outputs)
        for name in names:
            if name not in self._outputs:
                raise InvalidInputError(f"output {name!r}: the graph has {sorted(self._outputs)}")
        with translated(KernelError, "step failed"):
            return self._device.run(self._checked, names)

    def interrupt(self) -> None:
        """End the run() under way at its next node, with an exception, and every later one; called from any thread.

        Nothing happens on a GPU: its steps are short. The session is good for close() only.
        """
        self._device.interrupt()

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
        """Free the session and the KV cache; run() fails afterwards. Idempotent."""
        if not self._closed:
            self._closed = True
            self._checked, self._places = {}, None
            self._device.close()


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
    missing = set(KV_INPUTS) - set(names)
    if unknown or missing:
        raise SessionCreateError(
            f"the graph's inputs are not those of this trivet (unknown {sorted(unknown)}, missing {sorted(missing)}): "
            "export the checkpoint again"
        )
    return {
        name: (np.dtype(dtype), shape)
        for name, (dtype, shape) in GRAPH_INPUTS.items()
        if name in names and name not in KV_INPUTS
    }
