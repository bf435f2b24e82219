"""Schemas of the ops of the domain `ai.trivet`, version 1, and the inputs and outputs of a model graph.

Exporters write these nodes, back ends implement them, the runtime feeds the graph inputs. All activations are
float32; a weight matrix is a uint8 tensor `[out_features, row_bytes]` in one of `formats.FORMATS`, as it lies in
the checkpoint. T = scheduled tokens of the step, packed without padding; R = scheduled requests; S = rows to sample.
"""

from __future__ import annotations

from typing import Final

import msgspec

DOMAIN: Final = "ai.trivet"
OPSET_VERSION: Final = 1


class OpSchema(msgspec.Struct, frozen=True):
    """Names of an op's inputs, outputs and attributes, in order. A name that ends in `?` is optional."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...] = ()


OPS: dict[str, OpSchema] = {
    s.name: s
    for s in (
        # hidden[T, dim] = dequantize(weight[input_ids[t]]) * scale. An id outside the table is an error.
        OpSchema("EmbedTokens", ("input_ids", "weight"), ("hidden",), ("format", "dim", "scale")),
        # cos_sin[T, rotary_dim]: cos(pos * inv_freq) in the first half, sin in the second, both times `scale`.
        OpSchema("RotaryTable", ("positions", "inv_freq"), ("cos_sin",), ("scale",)),
        # y = x / sqrt(mean(x^2) + eps) * weight, row by row.
        OpSchema("RMSNorm", ("x", "weight"), ("y",), ("eps",)),
        # residual_out = x + residual; y = RMSNorm(residual_out). With `post_weight` (Gemma's norm after a block):
        # residual_out = RMSNorm(x, post_weight) + residual. With `rows` (int32 [S]): y[s] and residual_out[s] are of
        # x[rows[s]] and residual[rows[s]], else every row is taken. A row outside x is an error.
        OpSchema("AddRMSNorm", ("x", "residual", "weight", "post_weight?", "rows?"), ("y", "residual_out"), ("eps",)),
        # y = concat(x @ w_i^T) (+ bias) for 1..3 weights, activated by `epilogue`:
        #   "none"; "swiglu": silu(x @ w0^T) * (x @ w1^T); "geglu": gelu_tanh(x @ w0^T) * (x @ w1^T).
        # formats: one name per weight, joined by commas ("q4_0,q4_0,q6_k": onnxruntime 1.24 cannot hand a list of
        # strings to an op); out_features: one int per weight.
        OpSchema(
            "QMatMul",
            ("x", "bias?", "w0", "w1?", "w2?"),
            ("y",),
            ("formats", "in_features", "out_features", "epilogue"),
        ),
        # Reads merged rows qkv[T, (num_heads + 2 * num_kv_heads) * head_dim]; applies q_norm/k_norm (RMSNorm over
        # head_dim, if given) and rope (cos_sin), writes K and V to the slots of the KV cache, attends over the block
        # table with causal masking by absolute position. kv_cache_out is the same memory as kv_cache.
        #   kv_offset: elements per token that the layers before this one hold (see KV layout below)
        #   rope_interleaved: 1 = pairs (2i, 2i+1), 0 = pairs (i, i + rotary_dim/2)
        #   sliding_window: 0 = none; else key position > query position - sliding_window
        #   soft_cap: 0 = none; else scores = soft_cap * tanh(scores / soft_cap)
        OpSchema(
            "PagedAttention",
            (
                "qkv",
                "kv_cache",
                "kv_layout",
                "cos_sin",
                "positions",
                "slot_mapping",
                "block_table",
                "query_start_loc",
                "seq_lens",
                "q_norm?",
                "k_norm?",
                "sinks?",
            ),
            ("out", "kv_cache_out"),
            (
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "kv_offset",
                "scale",
                "rope_interleaved",
                "sliding_window",
                "soft_cap",
                "norm_eps",
            ),
        ),
        # logits[S, vocab] = x @ weight^T, then soft_cap * tanh(logits / soft_cap) if soft_cap > 0.
        OpSchema(
            "LogitsHead",
            ("x", "weight"),
            ("logits",),
            ("format", "in_features", "vocab_size", "soft_cap"),
        ),
        # See "Sampling" below. logits is read only.
        OpSchema(
            "Sample",
            (
                "logits",
                "sampling_floats",
                "sampling_ints",
                "token_history",
                "token_history_loc",
                "allowed_token_ids",
                "allowed_token_ids_loc",
                "banned_token_ids",
                "banned_token_ids_loc",
                "bias_token_ids",
                "bias_values",
                "bias_loc",
                "bitmask",
                "max_num_logprobs",
            ),
            ("sampled_token_ids", "sampled_logprobs", "sampled_ranks", "top_token_ids", "top_logprobs"),
        ),
    )
}


# --- KV layout -------------------------------------------------------------------------------------------------
# kv_cache: uint8 [num_blocks, block_size * bytes per token], block 0 is the null block. kv_layout: int32 [2] = (KV
# dtype code, block_size). Only PagedAttention looks inside, so each device orders it for its own reads:
#   CPU: a layer starts at element kv_offset * num_blocks * block_size and holds, block by block, for each KV head the
#   keys [head_dim, block_size], then the values [block_size, head_dim]. So a vector of keys is one load, and a layer
#   reads the blocks of a sequence, mostly neighbours, as one stream.
#   CPU, int16_per_token_head: what is multiplied and added in one 32-bit lane lies together: keys [head_dim / 2,
#   block_size, 2 elements], values [block_size / 2, head_dim, 2 tokens], then float32 scales of the keys [block_size]
#   and of the values [block_size]. kv_offset grows by the scales. head_dim, the same in all layers, and block_size are
#   multiples of 16.
#   CUDA: a block holds all layers; in it a layer starts at element kv_offset * block_size and holds
#   [2 (K, V), num_kv_heads, block_size, head_dim].
class KvDtype(msgspec.Struct, frozen=True):
    """A type of the KV cache's elements."""

    code: int
    element_bytes: int
    scale_elements: int = 0  # room for the scale of each key and value, in elements

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of one key or value of one head, its scale included."""
        return (head_dim + self.scale_elements) * self.element_bytes


KV_DTYPES: Final[dict[str, KvDtype]] = {
    "float32": KvDtype(0, 4),
    "float16": KvDtype(1, 2),
    "bfloat16": KvDtype(2, 2),
    "fp8_e4m3": KvDtype(3, 1),  # without scales; what it cannot hold becomes +-448. CUDA only
    # The CPU tier avx512_vnni only. A key's scale is its L2 norm / 32767, so products with a query, quantised likewise,
    # stay below 2^31; a value's is its largest element / 32767.
    "int16_per_token_head": KvDtype(4, 2, scale_elements=2),
}

# --- Sampling --------------------------------------------------------------------------------------------------
# Columns of sampling_floats, float32 [S, 6].
SAMPLING_FLOATS: Final = (
    "temperature",  # < 1e-5: greedy
    "top_p",  # 1 = off
    "min_p",  # 0 = off
    "repetition_penalty",  # 1 = off; over prompt and output tokens
    "frequency_penalty",  # 0 = off; over output tokens
    "presence_penalty",  # 0 = off; over output tokens
)
# Columns of sampling_ints, int64 [S, 6].
SAMPLING_INTS: Final = (
    "top_k",  # 0 = off
    "seed",  # 64 bits, as int64
    "offset",  # index of the token to draw in its sequence: the draw is a function of (seed, offset) only
    "num_logprobs",  # -1: none wanted for this row; n: the sampled token's logprob and the top n
    "forced_token_id",  # -1: sample; else this token is "sampled" (prompt_logprobs, teacher forcing)
    "num_prompt_tokens",  # how many of this row's token_history entries are prompt
)
# token_history: int32, prompt then output tokens of each row that uses a penalty, row s in
# [token_history_loc[s], token_history_loc[s + 1]); the *_loc arrays are int32 [S + 1]. allowed_token_ids: empty row =
# all allowed. banned_token_ids: logit becomes -inf. bias_values: float32, added. bitmask: int32
# [S, ceil(vocab / 32)] or [0, 0] when no row has a grammar; bit 1 = allowed. max_num_logprobs: int32 scalar K.
# Order: raw logprobs (log_softmax of the given logits) -> allowed -> banned (bad words, min_tokens) -> bias -> bitmask
# -> repetition, frequency, presence penalties -> greedy, or temperature -> min_p -> top_k -> top_p -> draw.
# Ties in the argmax and in ranks go to the lower id. sampled_ranks is 1-based in the raw logits. top_* are [S, K],
# unused columns -1 / -inf. A row whose given logits cannot be sampled (one is NaN or +inf, or all are -inf), forced or
# not, gets sampled_token_ids NO_TOKEN, logprob -inf, rank -1 and unused columns; the other rows do not notice.
NO_TOKEN: Final = -1

# --- Graph inputs and outputs ----------------------------------------------------------------------------------
GRAPH_INPUTS: Final[dict[str, tuple[str, tuple[str | int, ...]]]] = {  # name -> (dtype, shape)
    "input_ids": ("int32", ("T",)),
    "positions": ("int32", ("T",)),
    "slot_mapping": ("int32", ("T",)),  # block_id * block_size + offset; -1 = do not write
    "block_table": ("int32", ("R", "max_blocks")),
    "query_start_loc": ("int32", ("R+1",)),
    "seq_lens": ("int32", ("R",)),  # tokens in the KV cache after this step
    "logits_indices": ("int32", ("S",)),
    "kv_cache": ("uint8", ("num_blocks", "block_bytes")),
    "kv_layout": ("int32", (2,)),
    "sampling_floats": ("float32", ("S", len(SAMPLING_FLOATS))),
    "sampling_ints": ("int64", ("S", len(SAMPLING_INTS))),
    "token_history": ("int32", ("num_history",)),
    "token_history_loc": ("int32", ("S+1",)),
    "allowed_token_ids": ("int32", ("num_allowed",)),
    "allowed_token_ids_loc": ("int32", ("S+1",)),
    "banned_token_ids": ("int32", ("num_banned",)),
    "banned_token_ids_loc": ("int32", ("S+1",)),
    "bias_token_ids": ("int32", ("num_bias",)),
    "bias_values": ("float32", ("num_bias",)),
    "bias_loc": ("int32", ("S+1",)),
    "bitmask": ("int32", ("num_masked", "mask_words")),
    "max_num_logprobs": ("int32", ()),
}
GRAPH_OUTPUTS: Final[dict[str, tuple[str, tuple[str | int, ...]]]] = {
    "sampled_token_ids": ("int32", ("S",)),
    "sampled_logprobs": ("float32", ("S",)),
    "sampled_ranks": ("int32", ("S",)),
    "top_token_ids": ("int32", ("S", "K")),
    "top_logprobs": ("float32", ("S", "K")),
    "logits": ("float32", ("S", "vocab")),  # before sampling; stays on the device unless asked for
    "kv_cache_out": ("uint8", ("num_blocks", "block_bytes")),  # bound to the same memory as kv_cache
}

# Session configuration entries that our op libraries read.
SESSION_NUM_THREADS: Final = "trivet.num_threads"
SESSION_ACTIVATION_DTYPE: Final = (
    "trivet.activation_dtype"  # "int8": quantised per 32-block for block formats; "float32"
)
SESSION_CPU_TIER: Final = "trivet.cpu_tier"  # force a tier; the environment variable TRIVET_CPU_TIER is the default
