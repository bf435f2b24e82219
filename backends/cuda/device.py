"""libtrivet_cuda from Python: which devices there are, memory on one of them, copies in the order of its stream."""

from __future__ import annotations

import ctypes
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BackendError, DeviceMemoryError, KernelError, LibraryNotFoundError, UnsupportedDeviceError

if TYPE_CHECKING:
    import onnxruntime
    from numpy.typing import NDArray

PROVIDER = "TrivetCudaExecutionProvider"
MAX_CAPTURED_ROWS = 512  # of a decode step; larger ones are not bound by launches
VENDOR_ID = 0x10DE
_LIBRARY = Path(__file__).parent / "libtrivet_cuda.so"
_REGISTRATION = "trivet_cuda"
_OPTION_CONTEXT, _OPTION_CAPTURE = "context", "capture"

_u64, _i64, _pointer = ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "describe": (),
    "open": (ctypes.c_int, ctypes.POINTER(_i64)),
    "close": (_i64,),
    "memory": (_i64, ctypes.POINTER(_u64), ctypes.POINTER(_u64)),
    "allocate": (_i64, _u64, ctypes.POINTER(_pointer)),
    "release": (_i64, _pointer),
    "allocate_pinned": (_i64, _u64, ctypes.POINTER(_pointer)),
    "release_pinned": (_i64, _pointer),
    "take_refusal": (_i64,),
    "end_upload": (_i64,),
    "copy": (_i64, _pointer, _pointer, _u64),
    "fill": (_i64, _pointer, ctypes.c_int, _u64),
    "finish": (_i64,),
}


def library_path() -> Path:
    """Path of libtrivet_cuda; LibraryNotFoundError says why there may be none."""
    if not _LIBRARY.is_file():
        raise LibraryNotFoundError(
            f"{_LIBRARY} does not exist: this trivet was built without CUDA, which takes a CUDA 13 nvcc and an "
            "NVIDIA GPU of a known SM (CMAKE_ARGS=-DTRIVET_CUDA=ON builds for all of them without a GPU). "
            "Build trivet again, or use device 'cpu'"
        )
    return _LIBRARY


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, f"trivet_cuda_{name}")
        function.argtypes = arguments
        function.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: Any, error: type[BackendError] = BackendError) -> None:
    message: bytes = getattr(_library(), f"trivet_cuda_{name}")(*arguments)
    if message:
        raise error(message.decode())


def probe_devices() -> dict[str, Any]:
    """What the driver offers: architectures, driver_version, runtime_version, error, and devices, each with ordinal,
    name, sm, kernels (the architecture whose code it runs), total_memory (bytes), multiprocessors and refused ("" =
    usable)."""
    described: dict[str, Any] = json.loads(_library().trivet_cuda_describe())
    return described


def describe_cuda() -> dict[str, Any]:
    """Facts for `trivet doctor`; a library that is not built is a fact, too."""
    try:
        capture = f"decode steps of up to {MAX_CAPTURED_ROWS} requests"
        return {"library": str(library_path()), "capture": capture} | probe_devices()
    except LibraryNotFoundError as error:
        return {"library": None, "devices": [], "error": str(error)}


def why_not(ordinal: int) -> str:
    """Why this device cannot be used; "" = it can."""
    facts = describe_cuda()
    if facts["error"]:
        return str(facts["error"])
    for device in facts["devices"]:
        if device["ordinal"] == ordinal:
            return str(device["refused"])
    return f"device cuda:{ordinal} does not exist: CUDA offers {len(facts['devices'])} device(s)"


def first_device() -> tuple[int | None, str]:
    """The ordinal of the first device that can be used, or None and why there is none."""
    facts = describe_cuda()
    problems = [str(facts["error"])] if facts["error"] else []
    for device in facts["devices"]:
        if not device["refused"]:
            return int(device["ordinal"]), ""
        problems.append(str(device["refused"]))
    return None, "; ".join(problems) or "CUDA offers no device"


def free_memory_bytes(ordinal: int) -> int:
    """Bytes that a session on the device could still allocate. Raises UnsupportedDeviceError."""
    device = CudaDevice(ordinal)
    try:
        return device.memory()[0]
    finally:
        device.close()


def parse_device(name: str) -> int:
    """The ordinal of "cuda" or "cuda:N"; UnsupportedDeviceError otherwise."""
    kind, colon, text = name.partition(":")
    if kind == "cuda" and (text.isascii() and text.isdigit() if colon else True):
        return int(text or 0)
    raise UnsupportedDeviceError(f"device {name!r}: expected 'cpu', 'cuda' or 'cuda:N' with a device number N from 0")


class CudaDevice:
    """One device and one stream on it. All copies and fills run in the order of the calls; finish() waits for them."""

    def __init__(self, ordinal: int) -> None:
        """Raises UnsupportedDeviceError: no driver, no such device, or one that there are no kernels for."""
        handle = _i64()
        _call("open", ordinal, ctypes.byref(handle), error=UnsupportedDeviceError)
        self.ordinal = ordinal
        self._handle: int = handle.value

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        free, total = _u64(), _u64()
        _call("memory", self._handle, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, num_bytes: int) -> int:
        """Address of uninitialised device memory; it goes with the device. DeviceMemoryError: there is not enough."""
        memory = _pointer()
        try:
            _call("allocate", self._handle, num_bytes, ctypes.byref(memory))
        except BackendError as error:
            if refusal := self.take_refusal():
                raise DeviceMemoryError(refusal) from error
            raise
        return memory.value or 0

    def take_refusal(self) -> str:
        """The last allocation that failed for want of memory since this was last asked, with figures; "" = none."""
        message: bytes = _library().trivet_cuda_take_refusal(self._handle)
        return message.decode()

    def release(self, address: int) -> None:
        """Gives memory back for later allocations of this device."""
        _call("release", self._handle, address)

    def pinned(self, num_bytes: int) -> NDArray[Any]:
        """uint8 array in host memory that the device copies from and to directly; it goes with the device."""
        import numpy as np

        memory = _pointer()
        _call("allocate_pinned", self._handle, max(num_bytes, 1), ctypes.byref(memory))
        assert memory.value is not None
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(memory.value))

    def release_pinned(self, array: NDArray[Any]) -> None:
        """Give pinned memory back; the array, and what was made of it, must not be used any more."""
        _call("release_pinned", self._handle, array.ctypes.data)

    def end_upload(self) -> None:
        """The weights are on the device: free what their transfer has pinned."""
        _call("end_upload", self._handle)

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Between any two addresses, host or device."""
        if num_bytes:
            _call("copy", self._handle, to, source, num_bytes)

    def fill(self, address: int, value: int, num_bytes: int) -> None:
        if num_bytes:
            _call("fill", self._handle, address, value, num_bytes)

    def finish(self) -> None:
        """Wait for all work. KernelError: a CUDA error, or a bad value that a kernel found since the last call."""
        _call("finish", self._handle, error=KernelError)

    def close(self) -> None:
        """Free everything once the sessions on it are gone as well; also after a CUDA error, when little works."""
        handle, self._handle = self._handle, 0
        if handle != 0:
            _call("close", handle)

    def add_to(self, options: onnxruntime.SessionOptions, *, capture: bool) -> None:
        """Make sessions with these options run here; capture: runs with a `gpu_graph_id` from 0 become graphs."""
        entries = {_OPTION_CONTEXT: str(self._handle), _OPTION_CAPTURE: "1" if capture else "0"}
        options.add_provider_for_devices([_ep_device(self.ordinal)], entries)

    def ort_device(self) -> Any:
        """The device as onnxruntime's binding functions want it."""
        import onnxruntime as ort

        return ort.OrtDevice.make("gpu", self.ordinal, VENDOR_ID)._get_c_device()


def _ep_device(ordinal: int) -> Any:
    _register()
    import onnxruntime as ort

    for device in ort.get_ep_devices():
        if device.ep_name == PROVIDER and device.ep_metadata.get("cuda_device_id") == str(ordinal):
            return device
    raise UnsupportedDeviceError(
        f"onnxruntime does not offer cuda:{ordinal}, which the driver does: unsupported version"
    )


@cache
def _register() -> None:
    """Once per process; onnxruntime keeps the library until the process ends."""
    import onnxruntime as ort

    try:
        ort.register_execution_provider_library(_REGISTRATION, str(library_path()))
    except (RuntimeError, ort.capi.onnxruntime_pybind11_state.Fail) as error:
        raise UnsupportedDeviceError(
            f"onnxruntime {ort.__version__} does not load {library_path()}: {error}"
        ) from error
