"""Proof of an export: the graph and reference.py must compute the same from the same tokens.

The only file of the exporters that reaches a back end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..backends.contract.manifest import Manifest, Verification
from ..backends.contract.opset import SAMPLING_FLOATS, SAMPLING_INTS
from ..backends.errors import UnsupportedDeviceError
from ..backends.library import dequantize_rows
from .architectures.model import Model
from .dequantize.base import Bytes, Floats
from .errors import ExportError, VerificationError
from .reference import ReferenceResult, evaluate

NUM_TOKENS: Final = 8
# Both sides are float32 and differ in the order of their sums only: real models differ by 1e-6 to 1e-5. A wrong rope,
# norm, scale or permutation differs by 1e-1 or more, so 1e-3 tells the two apart on any model.
TOLERANCE: Final = 1e-3
_BLOCK_SIZE: Final = 16
_INSTEAD: Final = "to export without the proof, use --no-verify (verify=False)"


def verified(package_dir: Path, manifest: Manifest, model: Model, progress: Callable[[str, float], None]) -> Manifest:
    """The manifest with the outcome recorded; VerificationError if the graph differs from the checkpoint."""
    token_ids = fixed_tokens(model.vocab_size)
    progress("evaluating the checkpoint", 0.2)
    reference = evaluate(
        model,
        token_ids,
        lambda done: progress("evaluating the checkpoint", 0.2 + 0.6 * done),
        dequantize=_dequantize,
    )
    progress("running the graph", 0.8)
    residuals, logits = _run_graph(package_dir, manifest, token_ids)
    error = compare(reference, residuals, logits)
    outcome = Verification(performed=True, num_tokens=NUM_TOKENS, max_relative_error=error, tolerance=TOLERANCE)
    return msgspec.structs.replace(manifest, verification=outcome)


def fixed_tokens(vocab_size: int) -> NDArray[np.int32]:
    """Ids spread over the whole vocabulary, first and last included, out of order."""
    spread = np.arange(NUM_TOKENS, dtype=np.int64) * (vocab_size - 1) // (NUM_TOKENS - 1)
    return spread[[1, 6, 0, 3, 7, 2, 5, 4]].astype(np.int32)


def compare(reference: ReferenceResult, residuals: list[NDArray[Any]], logits: NDArray[Any]) -> float:
    """Largest relative error of a row of logits; VerificationError names the first layer that is off."""
    for layer, (ours, expected) in enumerate(zip(residuals, reference.residuals, strict=True)):
        if not (error := relative_error(ours, expected)) <= TOLERANCE:
            raise VerificationError(
                f"the exported graph differs from the checkpoint: layer {layer} is the first with a relative error "
                f"of {error:.2e} in its output, expected at most {TOLERANCE:g}; this is a defect of trivet, please "
                f"report it with the name of the model; {_INSTEAD}"
            )
    if not (error := relative_error(logits, reference.logits)) <= TOLERANCE:
        raise VerificationError(
            f"the exported graph differs from the checkpoint: all layers agree, the logits have a relative error of "
            f"{error:.2e}, expected at most {TOLERANCE:g}; this is a defect of trivet, please report it with the name "
            f"of the model; {_INSTEAD}"
        )
    return error


def relative_error(ours: NDArray[Any], expected: NDArray[Any]) -> float:
    """max over rows of |ours - expected|_2 / |expected|_2; NaN if anything is not finite."""
    if ours.shape != expected.shape or not (np.isfinite(ours).all() and np.isfinite(expected).all()):
        return float("nan")
    wide = expected.astype(np.float64)
    norms = np.maximum(np.linalg.norm(wide, axis=-1), np.finfo(np.float32).tiny)
    return float(np.max(np.linalg.norm(ours.astype(np.float64) - wide, axis=-1) / norms))


def _run_graph(
    package_dir: Path, manifest: Manifest, token_ids: NDArray[np.int32]
) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """(residual stream after each layer, logits of every token) of the exported graph."""
    names = [f"layers.{layer}.residual" for layer in range(manifest.architecture.num_hidden_layers)]
    with _back_end():
        from ..backends.session import ModelSession

        session = ModelSession(package_dir, manifest, activation_dtype="float32", extra_outputs=names)
        try:
            session.allocate_kv_cache(num_blocks=2, block_size=_BLOCK_SIZE, dtype="float32")
            outputs = session.run(_inputs(token_ids), ["logits"])
        finally:
            session.close()
    return [outputs[name] for name in names], outputs["logits"]


def _dequantize(name: str, rows: Bytes, out: Floats) -> Floats:
    with _back_end():
        return dequantize_rows(name, rows, out)


@contextmanager
def _back_end() -> Iterator[None]:
    """Whatever keeps the back end from starting or running, the way out is the same."""
    try:
        yield
    except UnsupportedDeviceError:
        raise  # what was asked for, a kernel tier, would not run the model either
    except Exception as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ExportError(f"cannot run the exported graph to prove it: {first_line}; {_INSTEAD}") from error


def _inputs(token_ids: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    """One request from position 0, in block 1 (block 0 is the null block); every row sampled greedily."""
    count = len(token_ids)
    positions = np.arange(count, dtype=np.int32)
    sampling_floats = np.zeros((count, len(SAMPLING_FLOATS)), np.float32)
    sampling_floats[:, [SAMPLING_FLOATS.index("top_p"), SAMPLING_FLOATS.index("repetition_penalty")]] = 1
    sampling_ints = np.zeros((count, len(SAMPLING_INTS)), np.int64)
    sampling_ints[:, [SAMPLING_INTS.index("num_logprobs"), SAMPLING_INTS.index("forced_token_id")]] = -1
    empty, no_rows = np.zeros(0, np.int32), np.zeros(count + 1, np.int32)
    return {
        "input_ids": token_ids,
        "positions": positions,
        "slot_mapping": positions + np.int32(_BLOCK_SIZE),
        "block_table": np.array([[1]], np.int32),
        "query_start_loc": np.array([0, count], np.int32),
        "seq_lens": np.array([count], np.int32),
        "logits_indices": positions,  # all, in order: so the last layer's residual has every row, too
        "sampling_floats": sampling_floats,
        "sampling_ints": sampling_ints,
        "token_history": empty,
        "token_history_loc": no_rows,
        "allowed_token_ids": empty,
        "allowed_token_ids_loc": no_rows,
        "banned_token_ids": empty,
        "banned_token_ids_loc": no_rows,
        "bias_token_ids": empty,
        "bias_values": np.zeros(0, np.float32),
        "bias_loc": no_rows,
        "bitmask": np.zeros((0, 0), np.int32),
        "max_num_logprobs": np.array(0, np.int32),
    }
