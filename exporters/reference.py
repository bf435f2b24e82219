"""A plain NumPy evaluation of a checkpoint: what the exported graph must compute.

It shares the model's blocks with the graph builder and, where the caller has the op library dequantise matrices, the
library's plain dequantisation, which tests compare with NumPy's bit for bit. Weights are dequantised in chunks of rows,
on a few threads, so that a chunk at a time is in memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .architectures.model import Attention, Linear, Mlp, Model, Norm, Rope
from .checkpoint.tensors import TensorInfo
from .dequantize import dequantize_rows, raw_rows, read_tensor
from .dequantize.base import Bytes, Floats

_CHUNK_ELEMENTS: Final = 1 << 19  # of a weight matrix, dequantised at a time per thread
_SMALL_PRODUCT: Final = 1 << 18  # multiplications that a BLAS does on the calling thread
_MAX_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    residuals: list[Floats]  # the residual stream after each layer [T, hidden_size]
    logits: Floats  # [T, vocab_size]


def evaluate(
    model: Model,
    token_ids: NDArray[np.int32],
    progress: Callable[[float], None] = lambda fraction: None,
    dequantize: Callable[[str, Bytes, Floats], Floats] = dequantize_rows,
) -> ReferenceResult:
    """Run one sequence from position 0 through the model, in float32.

    `dequantize`: dequantize_rows, or what does the same to the matrices, sooner.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return _Evaluation(model, threads, dequantize).run(token_ids, progress)


class _Evaluation:
    def __init__(
        self, model: Model, threads: ThreadPoolExecutor, dequantize: Callable[[str, Bytes, Floats], Floats]
    ) -> None:
        self.model = model
        self.threads = threads
        self.dequantize = dequantize
        self.scratch = threading.local()

    def run(self, token_ids: NDArray[np.int32], progress: Callable[[float], None]) -> ReferenceResult:
        model = self.model
        embedding = model.tensors[model.embedding]
        x = dequantize_rows(embedding.format, raw_rows(embedding)[token_ids]) * np.float32(model.embedding_scale)
        tables = {name: _rotary_table(rope, len(token_ids)) for name, rope in model.ropes.items()}
        residuals: list[Floats] = []
        for index, layer in enumerate(model.layers):
            attended = self._attention(layer.attention, self._norm(layer.input_norm, x), tables[layer.attention.rope])
            if layer.post_attention_norm is not None:
                attended = self._norm(layer.post_attention_norm, attended)
            x = x + attended
            transformed = self._mlp(layer.mlp, self._norm(layer.mlp_norm, x))
            if layer.post_mlp_norm is not None:
                transformed = self._norm(layer.post_mlp_norm, transformed)
            x = x + transformed
            residuals.append(x)
            progress((index + 1) / (len(model.layers) + 1))
        logits = self._matmul(self._norm(model.final_norm, x), model.tensors[model.lm_head])
        if model.logits_soft_cap:
            logits = _soft_cap(logits, model.logits_soft_cap)
        return ReferenceResult(residuals, logits)

    def _norm(self, norm: Norm, x: Floats) -> Floats:
        weight = read_tensor(self.model.tensors[norm.weight]) + np.float32(norm.weight_offset)
        mean_square = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
        y: Floats = (x / np.sqrt(mean_square + norm.eps) * weight).astype(np.float32)
        return y

    def _linear(self, linear: Linear, x: Floats) -> Floats:
        y = self._matmul(x, self.model.tensors[linear.weight])
        if linear.bias is not None:
            y += read_tensor(self.model.tensors[linear.bias])
        return y

    def _matmul(self, x: Floats, weight: TensorInfo) -> Floats:
        """x @ weight^T, a chunk of rows per task."""
        rows, in_features = raw_rows(weight), weight.shape[1]
        step = max(1, _CHUNK_ELEMENTS // in_features)
        x_columns = np.ascontiguousarray(x.T)
        y = np.empty((len(rows), len(x)), np.float32)

        def chunk(start: int) -> None:
            block = rows[start : start + step]
            values = self.dequantize(weight.format, block, self._buffer(len(block), in_features))
            _product(values, x_columns, y[start : start + step])

        for _ in self.threads.map(chunk, range(0, len(rows), step)):
            pass
        return np.ascontiguousarray(y.T)

    def _buffer(self, num_rows: int, in_features: int) -> Floats:
        """Scratch of this thread: fresh memory for every chunk would cost as much as the dequantisation."""
        count = num_rows * in_features
        if getattr(self.scratch, "size", 0) < count:
            self.scratch.values, self.scratch.size = np.empty(count, np.float32), count
        values: Floats = self.scratch.values
        return values[:count].reshape(num_rows, in_features)

    def _attention(self, attention: Attention, x: Floats, table: tuple[Floats, Floats]) -> Floats:
        num_tokens, head_dim, kv_heads = len(x), attention.head_dim, attention.num_kv_heads
        q = self._linear(attention.q, x).reshape(num_tokens, attention.num_heads, head_dim)
        k = self._linear(attention.k, x).reshape(num_tokens, kv_heads, head_dim)
        v = self._linear(attention.v, x).reshape(num_tokens, kv_heads, head_dim)
        if attention.q_norm is not None:
            q = self._norm(attention.q_norm, q)
        if attention.k_norm is not None:
            k = self._norm(attention.k_norm, k)
        k = _rotate(k, table, attention.rope_interleaved)
        # query heads grouped by the KV head that they share
        grouped = _rotate(q, table, attention.rope_interleaved).reshape(num_tokens, kv_heads, -1, head_dim)
        scores = np.einsum("tkgd,skd->kgts", grouped, k) * np.float32(attention.scale)
        if attention.soft_cap:
            scores = _soft_cap(scores, attention.soft_cap)
        scores = np.where(_visible(num_tokens, attention.sliding_window), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = np.einsum("kgts,skd->tkgd", weights, v).reshape(num_tokens, -1)
        return self._linear(attention.o, np.ascontiguousarray(attended, np.float32))

    def _mlp(self, mlp: Mlp, x: Floats) -> Floats:
        gate, up = self._linear(mlp.gate, x), self._linear(mlp.up, x)
        activated = _silu(gate) if mlp.activation == "silu" else _gelu_tanh(gate)
        return self._linear(mlp.down, activated * up)


def _product(values: Floats, x_columns: Floats, y: Floats) -> None:
    """y = values @ x_columns as a stack of small products: a BLAS's own threads would fight ours for the cores."""
    rows = max(1, _SMALL_PRODUCT // x_columns.size)
    whole = len(values) // rows * rows
    np.matmul(values[:whole].reshape(-1, rows, values.shape[1]), x_columns, out=y[:whole].reshape(-1, rows, y.shape[1]))
    np.matmul(values[whole:], x_columns, out=y[whole:])


def _visible(num_tokens: int, sliding_window: int) -> NDArray[np.bool_]:
    """[query, key]: causal, and within the window if there is one."""
    distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None, :]
    return (distance >= 0) & (distance < (sliding_window or num_tokens))


def _rotary_table(rope: Rope, num_tokens: int) -> tuple[Floats, Floats]:
    """(cos, sin), each [T, 1, head_dim / 2]."""
    angles = np.arange(num_tokens, dtype=np.float32)[:, None, None] * np.array(rope.inv_freq, np.float32)
    return np.cos(angles) * np.float32(rope.scale), np.sin(angles) * np.float32(rope.scale)


def _rotate(heads: Floats, table: tuple[Floats, Floats], interleaved: bool) -> Floats:
    """Rotate the pairs of [T, heads, head_dim]."""
    cos, sin = table
    half = heads.shape[-1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    rotated = np.empty_like(heads)
    rotated[..., first] = heads[..., first] * cos - heads[..., second] * sin
    rotated[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return rotated


def _soft_cap(x: Floats, cap: float) -> Floats:
    capped: Floats = np.tanh(x / np.float32(cap)) * np.float32(cap)
    return capped


def _silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp of a large number: the quotient is then 0, as it should be
        activated: Floats = x / (1 + np.exp(-x))
    return activated


def _gelu_tanh(x: Floats) -> Floats:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    activated: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return activated
