"""What the name of a device means: the one place that leads from it to a back end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import DeviceSession, SessionSettings


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
