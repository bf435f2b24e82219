"""What the name of a device means: the one place that leads from it to a back end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from .contract.opset import KV_DTYPES
from .errors import UnsupportedDeviceError

if TYPE_CHECKING:
    from .contract.manifest import KVCacheSpec
    from .session import DeviceSession, SessionSettings

_INT16_TIERS: Final = ("avx512_vnni",)  # that have a cache of int16_per_token_head
_WHOLE: Final = 16  # what int16 heads and blocks, and fp8 heads, are a multiple of: kernels take so much at a time
_EXPECTED: Final = "expected auto, float32, float16 or bfloat16"


class DeviceChoice(msgspec.Struct, frozen=True):
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


class DeviceKVCache(msgspec.Struct, frozen=True):
    """Which types of KV cache there are on a device for a model's layers."""

    device: str  # "cpu" or "cuda:N"
    cpu_tier: str | None  # that is forced; None = the best one
    specs: Sequence[KVCacheSpec]
    block_size: int  # tokens

    def resolve(self, asked: str, checkpoint_dtype: str) -> str:
        """The name in KV_DTYPES of a cache that is `asked` for, "auto" and "fp8" included; checkpoint_dtype: "float32",
        "float16", "bfloat16" or "quantized".

        "auto" is the fastest that is about as exact as float16, or what a checkpoint of floats has itself. Raises
        UnsupportedDeviceError.
        """
        if asked != "auto":
            return self.checked("fp8_e4m3" if asked == "fp8" else asked)
        if checkpoint_dtype != "float32" and not self._problem("int16_per_token_head"):
            return "int16_per_token_head"
        return checkpoint_dtype if checkpoint_dtype in KV_DTYPES else "float16"

    def checked(self, dtype: str) -> str:
        """`dtype`, a name of KV_DTYPES; UnsupportedDeviceError where there is no cache of this type."""
        if problem := self._problem(dtype):
            raise UnsupportedDeviceError(f"kv_cache_dtype {dtype!r} {problem}")
        return dtype

    def _problem(self, dtype: str) -> str:
        if dtype == "int16_per_token_head":
            return self._int16_problem()
        if dtype == "fp8_e4m3":
            if self.device == "cpu":
                return f"is for CUDA devices, the model would run on the CPU: {_EXPECTED}"
            if unfit := self._unfit_heads():
                return f"needs heads of a multiple of {_WHOLE} elements, this model has {unfit}: {_EXPECTED}"
        return ""

    def _int16_problem(self) -> str:
        if self.device != "cpu":
            return f"is for CPUs, the model would run on {self.device}: {_EXPECTED}"
        from .library import select_tier

        if (tier := select_tier(self.cpu_tier)) not in _INT16_TIERS:
            return f"needs one of the CPU tiers {', '.join(_INT16_TIERS)}, this is {tier}: {_EXPECTED}"
        if unfit := self._unfit_heads():
            return f"needs heads of a multiple of {_WHOLE} elements, this model has {unfit}: {_EXPECTED}"
        if len(sizes := {spec.head_dim for spec in self.specs}) > 1:
            return f"needs heads of one size in all layers, this model has {sorted(sizes)}: {_EXPECTED}"
        if self.block_size % _WHOLE:
            return f"needs a block_size that is a multiple of {_WHOLE}, got {self.block_size}: {_EXPECTED}"
        return ""

    def _unfit_heads(self) -> list[int]:
        return sorted({spec.head_dim for spec in self.specs if spec.head_dim % _WHOLE})


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
