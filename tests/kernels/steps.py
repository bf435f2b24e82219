"""Graph inputs for one request, for tests that drive a ModelSession without the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trivet.backends.contract.opset import SAMPLING_FLOATS, SAMPLING_INTS

BLOCK_SIZE = 16


def step_inputs(
    token_ids: Sequence[int], num_computed: int, *, first_block: int = 1, sampled: Sequence[int] | None = None
) -> dict[str, NDArray[Any]]:
    """A greedy step of one request whose blocks are first_block, first_block + 1, ...

    sampled: the rows to sample; None = the last one.
    """
    count = len(token_ids)
    total = num_computed + count
    positions = np.arange(num_computed, total, dtype=np.int32)
    rows = np.array([count - 1] if sampled is None else sampled, np.int32)
    floats = dict.fromkeys(SAMPLING_FLOATS, 0.0) | {"top_p": 1.0, "repetition_penalty": 1.0}
    ints = dict.fromkeys(SAMPLING_INTS, 0) | {"num_logprobs": -1, "forced_token_id": -1}
    inputs: dict[str, NDArray[Any]] = {
        "input_ids": np.array(token_ids, np.int32),
        "positions": positions,
        "slot_mapping": ((first_block + positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE).astype("i4"),
        "block_table": np.arange(first_block, first_block + -(-total // BLOCK_SIZE), dtype=np.int32)[None],
        "query_start_loc": np.array([0, count], np.int32),
        "seq_lens": np.array([total], np.int32),
        "logits_indices": rows,
        "sampling_floats": np.tile(np.array(list(floats.values()), np.float32), (len(rows), 1)),
        "sampling_ints": np.tile(np.array(list(ints.values()), np.int64), (len(rows), 1)),
        "bitmask": np.zeros((0, 0), np.int32),
        "max_num_logprobs": np.array(0, np.int32),
    }
    for name, dtype in [
        ("token_history", np.int32),
        ("allowed_token_ids", np.int32),
        ("banned_token_ids", np.int32),
        ("bias_token_ids", np.int32),
        ("bias_values", np.float32),
    ]:
        inputs[name] = np.zeros(0, dtype)
    for name in ("token_history_loc", "allowed_token_ids_loc", "banned_token_ids_loc", "bias_loc"):
        inputs[name] = np.zeros(len(rows) + 1, np.int32)
    return inputs
