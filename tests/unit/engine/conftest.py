"""A toy model behind the real engine: a ModelSession in NumPy whose next token is a hash of what the KV cache holds.

It reads the cache through block_table and writes it through slot_mapping, so that a wrong block, slot, position or
chunk boundary changes the output, and it refuses to read a slot that nobody wrote.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers
from trivet.backends.contract import manifest as m
from trivet.backends.contract.opset import GRAPH_INPUTS, GRAPH_OUTPUTS, SAMPLING_FLOATS, SAMPLING_INTS
from trivet.backends.errors import KernelError
from trivet.exporters.package import source_of

VOCAB_SIZE = 320
EOS = 300  # a token beyond the bytes
MAX_POSITIONS = 512
_MIX = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix(state: int, token_id: int, position: int) -> int:
    """One link of the hash chain over a sequence."""
    state = (state ^ (token_id * 1_000_003 + position + 1)) & _MASK
    state = (state * _MIX) & _MASK
    return state ^ (state >> 29)


def toy_logits(state: int) -> NDArray[np.float32]:
    logits = np.random.default_rng(state).standard_normal(VOCAB_SIZE).astype(np.float32) * 3
    logits[:32] = logits[127:] = -20.0  # printable text, unless a bias says otherwise
    return logits


def toy_greedy(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the toy model generates, computed without any engine."""
    tokens, state = list(prompt), 0
    for position, token in enumerate(tokens):
        state = mix(state, token, position)
    for _ in range(num_tokens):
        tokens.append(int(np.argmax(toy_logits(state))))
        state = mix(state, tokens[-1], len(tokens) - 1)
    return tokens[len(prompt) :]


class ToySession:
    """Stands in for backends.session.ModelSession."""

    instances: ClassVar[list[ToySession]] = []
    before_run: ClassVar[Callable[[ToySession], None] | None] = None  # failure and latency injection

    def __init__(
        self, package_dir: Path, manifest: m.Manifest, *, meanwhile: Callable[[], None], **options: Any
    ) -> None:
        self.options = options
        meanwhile()
        self.kv: NDArray[np.int64] | None = None
        self.closed = False
        self.interrupted = threading.Event()
        self.num_runs = 0
        self.rows_sampled = 0
        self.batch_sizes: list[int] = []
        self.threads: set[int] = set()
        ToySession.instances.append(self)

    def allocate_kv_cache(self, *, num_blocks: int, block_size: int, dtype: str) -> int:
        assert self.kv is None
        self.kv = np.full((num_blocks * block_size, 2), -1, np.int64)
        self.block_size = block_size
        return self.kv.nbytes

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert self.kv is not None
        blocks = self.kv.reshape(-1, self.block_size, 2)
        for source, target in copies:
            assert source != target and 0 not in (source, target)
            blocks[target] = blocks[source]

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        if ToySession.before_run is not None:
            ToySession.before_run(self)
        if self.interrupted.is_set():
            raise KernelError("step failed: interrupted")
        assert self.kv is not None and not self.closed
        _check_contract(inputs, outputs)
        self.num_runs += 1
        self.threads.add(threading.get_ident())
        self.batch_sizes.append(len(inputs["seq_lens"]))
        states = self._forward(inputs)
        sampled = [self._sample(inputs, row, states[i]) for row, i in enumerate(inputs["logits_indices"].tolist())]
        self.rows_sampled += len(sampled)
        return _pack(sampled, int(inputs["max_num_logprobs"]), outputs)

    def interrupt(self) -> None:
        self.interrupted.set()

    def _forward(self, inputs: Mapping[str, NDArray[Any]]) -> list[int]:
        """The hash of every scheduled token's causal context, as found in the cache."""
        assert self.kv is not None
        starts, positions = inputs["query_start_loc"].tolist(), inputs["positions"].tolist()
        slots = inputs["slot_mapping"].tolist()
        self.kv[slots, 0], self.kv[slots, 1] = inputs["input_ids"], inputs["positions"]
        states: list[int] = []
        for request, seq_len in enumerate(inputs["seq_lens"].tolist()):
            begin, end = starts[request], starts[request + 1]
            assert positions[begin:end] == list(range(seq_len - (end - begin), seq_len))
            index = np.arange(seq_len)
            where = inputs["block_table"][request][index // self.block_size] * self.block_size + index % self.block_size
            assert (where >= self.block_size).all(), "the null block holds no tokens"
            context = self.kv[where]
            assert (context[:, 1] == index).all(), f"slots hold positions {context[:, 1]}"
            chain, state = [], 0
            for token, position in context.tolist():
                state = mix(state, token, position)
                chain.append(state)
            states += chain[positions[begin] :]
        return states

    def _sample(self, inputs: Mapping[str, NDArray[Any]], row: int, state: int) -> tuple[int, NDArray[np.float64]]:
        floats = dict(zip(SAMPLING_FLOATS, inputs["sampling_floats"][row].tolist(), strict=True))
        ints = dict(zip(SAMPLING_INTS, inputs["sampling_ints"][row].tolist(), strict=True))
        raw = toy_logits(state).astype(np.float64)
        logprobs = raw - np.log(np.exp(raw).sum())
        logits = raw.copy()
        if (allowed := _ragged(inputs, "allowed_token_ids", "allowed_token_ids_loc", row)).size:
            logits[np.setdiff1d(np.arange(VOCAB_SIZE), allowed)] = -np.inf
        logits[_ragged(inputs, "banned_token_ids", "banned_token_ids_loc", row)] = -np.inf
        logits[_ragged(inputs, "bias_token_ids", "bias_loc", row)] += _ragged(inputs, "bias_values", "bias_loc", row)
        history = _ragged(inputs, "token_history", "token_history_loc", row)
        if floats["repetition_penalty"] != 1:
            seen = np.unique(history)
            logits[seen] /= np.where(logits[seen] > 0, floats["repetition_penalty"], 1 / floats["repetition_penalty"])
        counts = np.bincount(history[ints["num_prompt_tokens"] :], minlength=VOCAB_SIZE) if history.size else 0
        logits -= counts * floats["frequency_penalty"] + (np.asarray(counts) > 0) * floats["presence_penalty"]
        if ints["forced_token_id"] >= 0:
            return ints["forced_token_id"], logprobs
        if floats["temperature"] >= 1e-5:
            seed = (ints["seed"] & _MASK, ints["offset"])
            logits = logits / floats["temperature"] + np.random.default_rng(seed).gumbel(size=VOCAB_SIZE)
        return int(np.argmax(logits)), logprobs

    def close(self) -> None:
        self.closed, self.kv = True, None


def _ragged(inputs: Mapping[str, NDArray[Any]], name: str, loc: str, row: int) -> NDArray[Any]:
    return inputs[name][inputs[loc][row] : inputs[loc][row + 1]]


def _check_contract(inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> None:
    assert set(inputs) == set(GRAPH_INPUTS) - {"kv_cache", "kv_layout"}
    assert set(outputs) <= set(GRAPH_OUTPUTS)
    sizes: dict[str, int] = {"max_blocks": inputs["block_table"].shape[1]}
    for symbol, name in (("T", "input_ids"), ("R", "seq_lens"), ("S", "logits_indices")):
        sizes[symbol] = len(inputs[name])
    sizes["R+1"], sizes["S+1"] = sizes["R"] + 1, sizes["S"] + 1
    for name, array in inputs.items():
        dtype, shape = GRAPH_INPUTS[name]
        assert array.dtype == dtype, name
        assert array.flags["C_CONTIGUOUS"], name
        assert len(array.shape) == len(shape), name
        for want, have in zip(shape, array.shape, strict=True):
            assert have == (want if isinstance(want, int) else sizes.setdefault(want, have)), (name, array.shape)
    assert sizes["T"] >= 1


def _pack(
    sampled: list[tuple[int, NDArray[np.float64]]], max_num_logprobs: int, outputs: Sequence[str]
) -> dict[str, NDArray[Any]]:
    count = len(sampled)
    results: dict[str, NDArray[Any]] = {
        "sampled_token_ids": np.array([token for token, _ in sampled], np.int32),
        "sampled_logprobs": np.array([logprobs[token] for token, logprobs in sampled], np.float32),
        "sampled_ranks": np.array([1 + (lp > lp[token]).sum() for token, lp in sampled], np.int32),
        "top_token_ids": np.full((count, max_num_logprobs), -1, np.int32),
        "top_logprobs": np.full((count, max_num_logprobs), -np.inf, np.float32),
    }
    for row, (_, logprobs) in enumerate(sampled):
        top = np.argsort(-logprobs, kind="stable")[:max_num_logprobs]
        results["top_token_ids"][row], results["top_logprobs"][row] = top, logprobs[top]
    return {name: results[name] for name in outputs}


def write_toy_package(folder: Path) -> Path:
    """A package whose tokenizer maps printable bytes to themselves."""
    checkpoint = folder / "toy.gguf"
    checkpoint.write_bytes(b"toy")
    manifest = m.Manifest(
        schema_version=m.SCHEMA_VERSION,
        trivet_version="0",
        source_dir=str(folder),
        sources=[source_of(checkpoint)],
        architecture=m.Architecture(
            family="toy",
            name="toy",
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=MAX_POSITIONS,
            weight_formats={"f32": 1},
            dtype="float32",
            num_parameters=1,
        ),
        kv_cache=[m.KVCacheSpec(layer=0, num_kv_heads=64, head_dim=256, kv_offset=0)],  # a small pool of blocks
        tokenizer=m.TokenizerSpec(eos_token_ids=[EOS], eos_token="<eos>", longest_token_bytes=5),
        generation=m.GenerationDefaults(temperature=0.5, top_k=7),
        verification=m.Verification(performed=False),
    )
    m.write_manifest(manifest, folder)
    (folder / m.GRAPH_NAME).write_bytes(b"")
    (folder / m.CHAT_TEMPLATE_NAME).write_text(
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [chr(b) for b in range(33, 127)]
    others = iter(t for t in byte_tokens if t not in printable)
    vocab = {chr(b): b for b in range(33, 127)}
    vocab.update({token: i for i, token in zip([*range(33), *range(127, 256)], others, strict=True)})
    vocab["Ġ"], vocab[next(t for t, i in vocab.items() if i == 32)] = 32, vocab["Ġ"]
    vocab.update({f"<extra{i}>": i for i in range(256, VOCAB_SIZE) if i != EOS})
    vocab["<eos>"] = EOS
    tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / m.TOKENIZER_NAME))
    return folder


@pytest.fixture(autouse=True)
def _toy_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType("trivet.backends.session")
    module.ModelSession = ToySession  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trivet.backends.session", module)
    monkeypatch.setattr("trivet.backends.session", module, raising=False)
    ToySession.instances.clear()
    ToySession.before_run = None
    yield
    ToySession.before_run = None


@pytest.fixture
def toy() -> types.SimpleNamespace:
    """The toy model's parts, for tests (conftest modules cannot be imported by name)."""
    return types.SimpleNamespace(Session=ToySession, greedy=toy_greedy, VOCAB_SIZE=VOCAB_SIZE, EOS=EOS)


@pytest.fixture
def package(tmp_path: Path) -> str:
    return str(write_toy_package(tmp_path))
