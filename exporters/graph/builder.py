"""A Model's blocks as nodes of the domain ai.trivet (backends/contract/opset.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ...backends.contract.opset import OPS
from ..architectures.model import Attention, DecoderLayer, Linear, Mlp, Model, Norm
from ..dequantize import read_tensor
from .writer import GraphWriter

if TYPE_CHECKING:
    import onnx

_EPILOGUES: Final = {"silu": "swiglu", "gelu_tanh": "geglu"}


def build_graph(model: Model, name: str, producer_version: str) -> onnx.ModelProto:
    """The model's token-packed graph; weights are external data, norms and biases are inside."""
    return _Builder(model).build(name, producer_version)


class _Builder:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.writer = GraphWriter()
        self.kv_cache = "kv_cache"  # the value that the next attention reads
        self.kv_offset = 0  # elements per token of the layers so far

    def build(self, name: str, producer_version: str) -> onnx.ModelProto:
        model, writer = self.model, self.writer
        embedding = model.tensors[model.embedding]
        writer.node(
            "EmbedTokens",
            ["input_ids", writer.external(model.embedding, embedding)],
            ["embedding"],
            format=embedding.format,
            dim=model.hidden_size,
            scale=float(model.embedding_scale),
        )
        for rope_name, rope in model.ropes.items():
            inv_freq = writer.inline(f"{rope_name}.inv_freq", np.array(rope.inv_freq, np.float32))
            writer.node("RotaryTable", ["positions", inv_freq], [f"{rope_name}.cos_sin"], scale=rope.scale)
        first = model.layers[0].input_norm
        normed = "layers.0.input_norm"
        writer.node("RMSNorm", ["embedding", self._norm(first)], [normed], eps=first.eps)
        residual = "embedding"
        for index, layer in enumerate(model.layers):
            normed, residual = self._layer(index, layer, normed, residual)
        self._head(normed)
        return writer.finish(name, producer_version)

    def _layer(self, index: int, layer: DecoderLayer, normed: str, residual: str) -> tuple[str, str]:
        """Add one layer; returns the next block's normed input and the residual stream."""
        prefix = f"layers.{index}."
        last = index + 1 == len(self.model.layers)
        attended = self._attention(prefix, layer.attention, normed, "kv_cache_out" if last else prefix + "kv_cache")
        rows = "logits_indices" if last else None  # the rest of the last layer is computed for the sampled rows only
        middle = self._add_norm(
            attended,
            residual,
            layer.mlp_norm,
            layer.post_attention_norm,
            prefix + "mlp_norm",
            prefix + "middle",
            rows=rows,
        )
        transformed = self._mlp(prefix, layer.mlp, middle[0])
        next_norm = self.model.final_norm if last else self.model.layers[index + 1].input_norm
        next_name = "final_norm" if last else f"layers.{index + 1}.input_norm"
        self.writer.describe(prefix + "residual", ["S" if last else "T", self.model.hidden_size])
        return self._add_norm(transformed, middle[1], next_norm, layer.post_mlp_norm, next_name, prefix + "residual")

    def _attention(self, prefix: str, attention: Attention, normed: str, kv_cache_out: str) -> str:
        qkv = self._matmul(prefix + "qkv", normed, [attention.q, attention.k, attention.v], "none")
        self.writer.node(
            "PagedAttention",
            [
                qkv,
                self.kv_cache,
                "kv_layout",
                f"{attention.rope}.cos_sin",
                "positions",
                "slot_mapping",
                "block_table",
                "query_start_loc",
                "seq_lens",
                self._norm(attention.q_norm) if attention.q_norm else None,
                self._norm(attention.k_norm) if attention.k_norm else None,
            ],
            [prefix + "attention", kv_cache_out],
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            kv_offset=self.kv_offset,
            scale=attention.scale,
            rope_interleaved=int(attention.rope_interleaved),
            sliding_window=attention.sliding_window,
            soft_cap=attention.soft_cap,
            norm_eps=attention.q_norm.eps if attention.q_norm else 0.0,
        )
        self.kv_cache = kv_cache_out
        self.kv_offset += 2 * attention.num_kv_heads * attention.head_dim
        return self._matmul(prefix + "attention_out", prefix + "attention", [attention.o], "none")

    def _mlp(self, prefix: str, mlp: Mlp, normed: str) -> str:
        gated = self._matmul(prefix + "gated", normed, [mlp.gate, mlp.up], _EPILOGUES[mlp.activation])
        return self._matmul(prefix + "mlp_out", gated, [mlp.down], "none")

    def _head(self, normed: str) -> None:
        model, writer = self.model, self.writer
        head = model.tensors[model.lm_head]
        writer.node(
            "LogitsHead",
            [normed, writer.external(model.lm_head, head)],
            ["logits"],
            format=head.format,
            in_features=model.hidden_size,
            vocab_size=model.vocab_size,
            soft_cap=float(model.logits_soft_cap),
        )
        sample = OPS["Sample"]  # its inputs but for the logits, and its outputs, are the graph's, by the same names
        writer.node("Sample", list(sample.inputs), list(sample.outputs))

    def _matmul(self, name: str, x: str, linears: list[Linear], epilogue: str) -> str:
        tensors = [self.model.tensors[linear.weight] for linear in linears]
        weights: list[str | None] = [
            self.writer.external(linear.weight, tensor) for linear, tensor in zip(linears, tensors, strict=True)
        ]
        self.writer.node(
            "QMatMul",
            [x, self._bias(name, linears), *weights],
            [name],
            formats=",".join(tensor.format for tensor in tensors),
            in_features=linears[0].in_features,
            out_features=[linear.out_features for linear in linears],
            epilogue=epilogue,
        )
        return name

    def _bias(self, name: str, linears: list[Linear]) -> str | None:
        """One bias for merged outputs; None if none of them has one."""
        if all(linear.bias is None for linear in linears):
            return None
        parts = [
            np.zeros(linear.out_features, np.float32)
            if linear.bias is None
            else read_tensor(self.model.tensors[linear.bias])
            for linear in linears
        ]
        return self.writer.inline(f"{name}.bias", np.concatenate(parts))

    def _norm(self, norm: Norm) -> str:
        """The norm's weight with its offset folded in."""
        weight = read_tensor(self.model.tensors[norm.weight])
        return self.writer.inline(norm.weight, weight + np.float32(norm.weight_offset))

    def _add_norm(
        self,
        x: str,
        residual: str,
        norm: Norm,
        post_norm: Norm | None,
        normed: str,
        residual_out: str,
        *,
        rows: str | None = None,
    ) -> tuple[str, str]:
        inputs = [x, residual, self._norm(norm), self._norm(post_norm) if post_norm else None, rows]
        self.writer.node("AddRMSNorm", inputs, [normed, residual_out], eps=norm.eps)
        return normed, residual_out
