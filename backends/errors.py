"""Exceptions of the back ends. Messages are complete: what came, what was expected, what to do."""

from __future__ import annotations


class BackendError(Exception):
    """Base of everything that backends raise."""


class LibraryNotFoundError(BackendError):
    """The op library of a device is not installed next to its loader."""


class UnsupportedDeviceError(BackendError, ValueError):
    """No back end for this device, or a CPU tier that this CPU cannot run."""


class SessionCreateError(BackendError):
    """The model does not load: a damaged package, a missing checkpoint file, attributes that an op rejects."""


class InvalidInputError(BackendError, ValueError):
    """An argument of a session does not fit the graph: name, dtype, shape or memory layout."""


class KernelError(BackendError):
    """A kernel failed while the graph ran."""


class CheckpointChangedError(BackendError):
    """A weight file was written to while a session reads it: what the session would compute means nothing."""


class DeviceMemoryError(BackendError):
    """The device has too little memory left for what was asked of it. Out of run(): the step was not completed, what it
    was to write into the KV cache is not to be relied upon, and the session is ready for another, smaller step."""
