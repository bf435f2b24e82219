"""What the sessions of all devices share of onnxruntime: options, the host as a binding target, its exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from .errors import BackendError

if TYPE_CHECKING:
    import onnxruntime

KV_INPUTS: Final = ("kv_cache", "kv_layout")
KV_OUTPUT: Final = "kv_cache_out"


def session_options(source_dir: str) -> onnxruntime.SessionOptions:
    """Options for a graph of ours whose external data lies in `source_dir`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # the op library has its own pool
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # The exporter emits what is to run; rewriting passes would only cost start-up time.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False  # plans are kept per input shape, and every step has another shape
    options.log_severity_level = 4  # errors reach the caller as exceptions
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", source_dir)
    return options


@cache
def host_device() -> Any:
    """Host memory, as the functions of a binding want it."""
    import onnxruntime as ort

    return ort.OrtDevice.make("cpu", 0)._get_c_device()


@contextmanager
def translated(error_type: type[BackendError], what: str) -> Iterator[None]:
    """The one place where onnxruntime's exceptions become ours."""
    try:
        yield
    except _exceptions() as error:
        # The status text follows a fixed prefix; what the op says is the useful part.
        text = str(error).rpartition("Status Message: ")[2]
        raise error_type(f"{what}: {text}") from error


@cache
def _exceptions() -> tuple[type[BaseException], ...]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = [value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*own, RuntimeError, ValueError)
