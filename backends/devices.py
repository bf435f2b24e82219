"""What the name of a device means: the one place that leads from it to a back end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .errors import UnsupportedDeviceError

if TYPE_CHECKING:
    from .contract.manifest import KVCacheSpec
    from .session import DeviceSession, SessionSettings

_CPU_KV_DTYPES: Final = ("float32", "float16", "bfloat16")
_FP8_HEADS: Final = 16  # an fp8 head of a multiple of so many elements can be copied in whole pieces of 16 bytes


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where a model runs on this machine."""

    name: str  # "cpu" or "cuda:N"
    fallback: str = ""  # why it is the CPU although a GPU was asked for; "" = it is what was asked for


def choose_device(device: str, *, require_gpu: bool = False) -> DeviceChoice:
    """What "auto", "cpu", "cuda" or "cuda:N" means here and now.

    "auto" is the CPU, or with require_gpu the same as "cuda": the first CUDA device that can be used. Where there is
    none, it is the CPU, and the choice says why, unless require_gpu. "cuda:N" means that device and no other.
    Raises UnsupportedDeviceError when a device that is required cannot be used.
    """
    if device == "cpu" or (device == "auto" and not require_gpu):
        return DeviceChoice("cpu")
    from .cuda.device import first_device, parse_device, why_not

    if device not in ("auto", "cuda"):
        ordinal = parse_device(device)
        if problem := why_not(ordinal):
            raise UnsupportedDeviceError(f"device {device!r} cannot be used: {problem}")
        return DeviceChoice(f"cuda:{ordinal}")
    first, problem = first_device()
    if first is not None:
        return DeviceChoice(f"cuda:{first}")
    if require_gpu:
        raise UnsupportedDeviceError(f"a GPU is required (require_gpu) and none can be used: {problem}")
    return DeviceChoice("cpu", f"no GPU can be used: {problem}")


def check_kv_dtype(device: str, dtype: str, specs: Sequence[KVCacheSpec]) -> None:
    """UnsupportedDeviceError where `device` ("cpu" or "cuda:N") has no KV cache of this type for layers like these."""
    if device == "cpu" and dtype not in _CPU_KV_DTYPES:
        raise UnsupportedDeviceError(
            f"kv_cache_dtype {dtype!r} is for CUDA devices, the model would run on the CPU: "
            f"expected auto or one of {', '.join(_CPU_KV_DTYPES)}"
        )
    unfit = sorted({spec.head_dim for spec in specs if spec.head_dim % _FP8_HEADS})
    if dtype == "fp8_e4m3" and unfit:
        raise UnsupportedDeviceError(
            f"kv_cache_dtype {dtype!r}: expected heads of a multiple of {_FP8_HEADS} elements, this model has {unfit}; "
            "use float16 or bfloat16"
        )


def open_device_session(model: bytes, settings: SessionSettings) -> DeviceSession:
    """A session of the serialised graph `model` on `settings.device`. Raises BackendError subclasses."""
    if settings.device == "cpu":
        from .cpu.session import CpuSession

        return CpuSession(model, settings)
    from .cuda.session import CudaSession

    return CudaSession(model, settings)


def free_device_bytes(device: str) -> int | None:
    """Memory that a session on a device with memory of its own could use; None for the CPU. Raises BackendError."""
    if device == "cpu":
        return None
    from .cuda.device import free_memory_bytes, parse_device

    return free_memory_bytes(parse_device(device))
