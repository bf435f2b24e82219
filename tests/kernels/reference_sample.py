"""NumPy reference of Sample, row by row, from the contract. Penalties in float32, then float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trivet.backends.contract.opset import NO_TOKEN

Array = NDArray[Any]


@dataclass(slots=True)
class Row:
    """What one row of Sample is asked to do; the defaults are greedy without anything."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_k: int = 0
    seed: int = 0
    offset: int = 0
    num_logprobs: int = -1
    forced_token_id: int = -1
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)
    banned: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    bitmask: Array | None = None  # bool [vocab]


def _packed(lists: list[list[int]]) -> tuple[Array, Array]:
    flat = np.array([i for one in lists for i in one], np.int32)
    return flat, np.cumsum([0, *map(len, lists)]).astype(np.int32)


def pack_bits(mask: Array) -> Array:
    """bool [S, vocab] -> int32 [S, ceil(vocab / 32)], bit i of word w = token 32 w + i."""
    words = -(-mask.shape[1] // 32)
    padded = np.zeros((len(mask), words * 32), bool)
    padded[:, : mask.shape[1]] = mask
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def sample_inputs(logits: Array, rows: list[Row], max_num_logprobs: int = 0) -> dict[str, Array]:
    """The op's inputs by name."""
    vocab = logits.shape[1]
    inputs: dict[str, Array] = {
        "logits": logits.astype(np.float32),
        "sampling_floats": np.array(
            [
                (r.temperature, r.top_p, r.min_p, r.repetition_penalty, r.frequency_penalty, r.presence_penalty)
                for r in rows
            ],
            np.float32,
        ).reshape(-1, 6),
        "sampling_ints": np.array(
            [(r.top_k, r.seed, r.offset, r.num_logprobs, r.forced_token_id, len(r.prompt)) for r in rows], np.int64
        ).reshape(-1, 6),
        "bias_values": np.array([v for r in rows for v in r.bias.values()], np.float32),
        "max_num_logprobs": np.array(max_num_logprobs, np.int32),
        "bitmask": np.zeros((0, 0), np.int32),
    }
    inputs["token_history"], inputs["token_history_loc"] = _packed([r.prompt + r.output for r in rows])
    inputs["allowed_token_ids"], inputs["allowed_token_ids_loc"] = _packed([r.allowed for r in rows])
    inputs["banned_token_ids"], inputs["banned_token_ids_loc"] = _packed([r.banned for r in rows])
    inputs["bias_token_ids"], inputs["bias_loc"] = _packed([list(r.bias) for r in rows])
    if any(r.bitmask is not None for r in rows):
        masks = [np.ones(vocab, bool) if r.bitmask is None else r.bitmask for r in rows]
        inputs["bitmask"] = pack_bits(np.stack(masks))
    return inputs


def sample_outputs(num_rows: int, max_num_logprobs: int = 0) -> dict[str, tuple[int, ...]]:
    """Shapes of the op's outputs by name."""
    one, top = (num_rows,), (num_rows, max_num_logprobs)
    return {
        "sampled_token_ids": one,
        "sampled_logprobs": one,
        "sampled_ranks": one,
        "top_token_ids": top,
        "top_logprobs": top,
    }


def uniform(seed: int, offset: int) -> float:
    """Philox4x32-10: key = seed, counter = offset; 53 bits of the first two words."""
    c = [offset & 0xFFFFFFFF, (offset >> 32) & 0xFFFFFFFF, 0, 0]
    k = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return ((c[0] << 32 | c[1]) >> 11) * 2.0**-53


def processed_logits(logits: Array, row: Row) -> Array:
    """float32 logits after masks, bias and penalties."""
    x = logits.astype(np.float32).copy()
    if row.allowed:
        keep = np.zeros(len(x), bool)
        keep[row.allowed] = True
        x[~keep] = -np.inf
    x[row.banned] = -np.inf
    for token, value in row.bias.items():
        x[token] += np.float32(value)
    if row.bitmask is not None:
        x[~row.bitmask] = -np.inf
    if (row.repetition_penalty, row.frequency_penalty, row.presence_penalty) != (1.0, 0.0, 0.0):
        counts = np.bincount(np.array(row.output, np.int64), minlength=len(x)).astype(np.float32)
        seen = np.unique(np.array(row.prompt + row.output, np.int64))
        penalty = np.float32(row.repetition_penalty)
        x[seen] = np.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
        x -= np.float32(row.frequency_penalty) * counts
        x -= np.float32(row.presence_penalty) * (counts > 0)
    return x


def by_rank(x: Array) -> Array:
    """Ids by descending value, ties by ascending id."""
    return np.argsort(-x.astype(np.float64), kind="stable")


def distribution(logits: Array, row: Row) -> Array:
    """float64 [vocab]: the probability of each token; one-hot when greedy."""
    x = processed_logits(logits, row)
    if row.temperature < 1e-5:
        return np.asarray(np.eye(len(x))[int(by_rank(x)[0])])
    x = (x / np.float32(row.temperature)).astype(np.float64)
    keep = np.isfinite(x)
    if row.min_p > 0:
        keep &= x >= x.max() + np.log(np.float64(np.float32(row.min_p)))
    if 0 < row.top_k < len(x):
        keep &= x >= np.sort(x)[-row.top_k]
    weights = np.where(keep, np.exp(x - x.max()), 0.0)
    if row.top_p < 1:
        order = by_rank(np.where(keep, x, -np.inf))
        share = np.cumsum(weights[order]) - weights[order]
        weights[order[share >= np.float64(np.float32(row.top_p)) * weights.sum()]] = 0.0
    return np.asarray(weights / weights.sum())


def sample(logits: Array, row: Row) -> int:
    """The row's token; NO_TOKEN for logits that cannot be sampled."""
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return NO_TOKEN
    if row.forced_token_id >= 0:
        return row.forced_token_id
    probabilities = distribution(logits, row)
    cumulative = np.cumsum(probabilities)
    return int(np.searchsorted(cumulative, uniform(row.seed, row.offset) * cumulative[-1], side="right"))


def log_softmax(logits: Array) -> Array:
    """float64."""
    x = logits.astype(np.float64)
    return np.asarray(x - x.max() - np.log(np.exp(x - x.max()).sum()))
