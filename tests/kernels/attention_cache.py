"""A paged KV cache on which PagedAttention runs step by step, compared with NumPy and with itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trivet.backends.contract.opset import KV_DTYPES

from .reference_attention import AttentionShape, paged_attention, rotary_table
from .single_op import CUDA_TIER, run_op
from .sizes import sized

Array = NDArray[Any]
OUT_BOUND = 2e-5  # absolute; values are of size 1, scores up to some 20
MEAN_BOUND = {"int16_per_token_head": 1e-4}  # queries and weights are int16, too
# A stored key may differ from the reference by one rounding of its dtype, which moves the output by this much.
KV_ULP = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7, "fp8_e4m3": 2**-3, "int16_per_token_head": 2**-11}
# Between numbers around zero, where that is not tiny; the norm of a key is 25 at most.
KV_STEP = {"fp8_e4m3": 2**-9, "int16_per_token_head": 25 / 32767}
# On CUDA the bits of a long step are those of a short one in this mode only; the CPU's attention has no other.
EXACT: dict[str, Any] = {"activation_dtype": "float32"}
LENGTH = sized(330, 140)
# Decoded token by token: several in a row, across the end of a partition, and the last ones.
DECODED = sized([*range(250, 262), *range(318, 330)], [*range(126, 130), *range(138, 140)])
BASE = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)


@dataclass
class Cache:
    """A pool of blocks and the sequences in it; `step` runs some of their tokens through the op."""

    shape: AttentionShape
    tokens: list[Array]  # per sequence, the merged qkv rows [length, ...]
    tier: str
    num_threads: int = 2
    activation_dtype: str = "int8"
    rotary_dim: int | None = None
    norms: bool = False
    sinks: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    memory: Array = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        s = self.shape = replace(self.shape, device="cuda" if self.tier == CUDA_TIER else "cpu")
        counts = [-(-len(rows) // s.block_size) for rows in self.tokens]
        ids = (rng.permutation(sum(counts)) + 1).tolist()
        if not self.blocks:
            self.blocks = [[ids.pop() for _ in range(count)] for count in counts]
        pool = 2 + max((b for table in self.blocks for b in table), default=0)
        # NaN in every dtype: whatever is read without having been written shows.
        self.memory = np.full((pool, s.block_size * s.token_bytes), 0xFF, np.uint8)

    def inputs(self, steps: list[tuple[int, int, int]], write: bool = True) -> dict[str, Array | None]:
        """The op's inputs for (sequence, first token, end token) of each request."""
        s = self.shape
        rng = np.random.default_rng(2)
        positions = np.array([p for _, a, b in steps for p in range(a, b)], np.int32)
        slots = [
            self.blocks[i][p // s.block_size] * s.block_size + p % s.block_size if write else -1
            for i, a, b in steps
            for p in range(a, b)
        ]
        table = np.full((len(steps), 1 + max((len(b) for b in self.blocks), default=0)), -7, np.int32)
        for r, (i, _, end) in enumerate(steps):
            used = -(-end // s.block_size)
            table[r, :used] = self.blocks[i][:used]
        rotary_dim = s.head_dim if self.rotary_dim is None else self.rotary_dim
        inv_freq = 1e4 ** -(np.arange(rotary_dim // 2) / max(rotary_dim // 2, 1))
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        return {
            "qkv": np.concatenate([self.tokens[i][a:b] for i, a, b in steps] or [np.zeros((0, width), np.float32)]),
            "kv_cache": self.memory,
            "kv_layout": np.array([KV_DTYPES[s.kv_dtype].code, s.block_size], np.int32),
            "cos_sin": rotary_table(positions, inv_freq, 1.0).astype(np.float32),
            "positions": positions,
            "slot_mapping": np.array(slots, np.int32),
            "block_table": table,
            "query_start_loc": np.cumsum([0, *(b - a for _, a, b in steps)]).astype(np.int32),
            "seq_lens": np.array([end for _, _, end in steps], np.int32),
            "q_norm": rng.uniform(0.5, 1.5, s.head_dim).astype(np.float32) if self.norms else None,
            "k_norm": rng.uniform(0.5, 1.5, s.head_dim).astype(np.float32) if self.norms else None,
            "sinks": rng.uniform(-1, 3, s.num_heads).astype(np.float32) if self.sinks else None,
        }

    def run(self, inputs: dict[str, Array | None]) -> Array:
        qkv = inputs["qkv"]
        assert qkv is not None
        result = run_op(
            "PagedAttention",
            inputs,
            self.shape.attributes(),
            outputs={
                "out": (len(qkv), self.shape.num_heads * self.shape.head_dim),
                "kv_cache_out": self.memory.shape,
            },
            aliases={"kv_cache_out": "kv_cache"},
            tier=self.tier,
            num_threads=self.num_threads,
            activation_dtype=self.activation_dtype,
        )
        self.memory = result["kv_cache_out"]
        return result["out"]

    def step(self, *steps: tuple[int, int, int], write: bool = True) -> Array:
        return self.run(self.inputs(list(steps), write))

    def checked_step(self, *steps: tuple[int, int, int]) -> None:
        """One step, compared with the reference: outputs, the slots written, and every other byte of the pool."""
        inputs = self.inputs(list(steps))
        out = self.run(inputs)
        expected, expected_cache = paged_attention(self.shape, inputs)
        ulp = KV_ULP[self.shape.kv_dtype]
        with np.errstate(invalid="ignore"):
            stored, wanted = self.shape.read(self.memory), self.shape.read(expected_cache)
        step = KV_STEP.get(self.shape.kv_dtype, 3e-6)
        np.testing.assert_allclose(stored, wanted, rtol=1.01 * ulp, atol=step, equal_nan=True)
        touched = np.zeros(self.memory.shape, np.uint8)
        for slot in inputs["slot_mapping"] if inputs["slot_mapping"] is not None else []:
            for view in self.shape.slot(touched, *divmod(int(slot), self.shape.block_size)):
                view.view(f"u{view.itemsize}")[:] = np.iinfo(f"u{view.itemsize}").max
        before = inputs["kv_cache"]
        assert before is not None
        untouched = touched == 0
        assert (self.memory[untouched] == before[untouched]).all(), "a slot that was not named has changed"
        if self.shape.kv_dtype == "float32":
            np.testing.assert_allclose(out, expected, rtol=0, atol=OUT_BOUND)
        else:  # the reference attends over its own roundings of the keys
            mean_error = float(np.abs(out - expected).mean()) if out.size else 0.0
            assert mean_error <= MEAN_BOUND.get(self.shape.kv_dtype, OUT_BOUND)
            np.testing.assert_allclose(out, expected, rtol=0, atol=OUT_BOUND + 2 * ulp)


def make_tokens(shape: AttentionShape, *lengths: int) -> list[Array]:
    rng = np.random.default_rng(sum(lengths))
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return [rng.standard_normal((n, width)).astype(np.float32) for n in lengths]


def check_against_reference(shape: AttentionShape, tier: str, options: dict[str, Any]) -> None:
    """Prefill in two unequal chunks, a decode step, and a mixed step of three requests."""
    cache = Cache(shape, make_tokens(shape, LENGTH, 75, 1), tier, **options)
    cache.checked_step((0, 0, 70))
    cache.checked_step((0, 70, LENGTH - 2))
    cache.checked_step((0, LENGTH - 2, LENGTH - 1), (2, 0, 1), (1, 0, 75))
    cache.checked_step((0, LENGTH - 1, LENGTH))


def check_batching(shape: AttentionShape, tier: str, options: dict[str, Any]) -> None:
    """Whole = token by token = chunks of 7 in a batch of others, on one thread and on three."""
    options = options | EXACT
    tokens = make_tokens(shape, LENGTH, 40)
    whole = Cache(shape, tokens, tier, **options).step((0, 0, LENGTH))
    assert np.isfinite(whole).all()

    single = Cache(shape, tokens, tier, num_threads=1, **options)
    done = 0
    for t in DECODED:
        if done < t:
            single.step((0, done, t))
        assert single.step((0, t, t + 1)).tobytes() == whole[t].tobytes(), t
        done = t + 1

    batched = Cache(shape, tokens, tier, num_threads=3, **options)
    batched.step((1, 0, 40))
    for start in range(0, LENGTH, 47):
        end = min(start + 47, LENGTH)
        out = batched.step((1, 39, 40), (0, start, end), (1, 20, 40))
        assert out[1 : 1 + end - start].tobytes() == whole[start:end].tobytes(), start
