"""Many prompts behind one prefix, cold and all at once: the prefix is computed once, whatever the steps look like."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
from trivet import LLM, SamplingParams

PREFIX = [40 + 7 * i % 80 for i in range(203)]  # twelve blocks of 16 and some
TAILS = [[40 + (13 * i + 5 * j) % 80 for j in range(6 + i)] for i in range(16)]
OUTPUT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


def prompt_tokens_computed(llm: LLM) -> int:
    """Since the engine began; the last token of an answer is never computed."""
    stats = llm.get_stats()
    return int(stats["num_computed_tokens"] - stats["num_generated_tokens"] * (OUTPUT - 1) / OUTPUT)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 48},
        {"max_num_batched_tokens": 100, "max_num_seqs": 5},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 32},
        {"block_size": 7},
    ],
    ids=["one_step", "prefix_in_chunks", "odd_chunks", "threshold", "block_size_7"],
)
def test_a_cold_prefix_is_computed_once(package: str, toy: types.SimpleNamespace, options: dict[str, Any]) -> None:
    """Beyond the prefix and the tails only what the prefix has in its last, partial block is computed again."""
    prompts = [PREFIX + tail for tail in TAILS]
    shared = len(PREFIX) // options.get("block_size", 16) * options.get("block_size", 16)
    expected = shared + sum(len(prompt) - shared for prompt in prompts)
    for order in (prompts, prompts[::-1], random.Random(0).sample(prompts, len(prompts))):
        with LLM(package, **options) as llm:
            outputs = llm.generate(order, GREEDY)
            assert [o.outputs[0].token_ids for o in outputs] == [toy.greedy(prompt, OUTPUT) for prompt in order]
            assert prompt_tokens_computed(llm) == expected


def test_a_warm_prefix_costs_the_tails_only(package: str) -> None:
    with LLM(package) as llm:
        llm.generate([PREFIX + TAILS[0]], GREEDY)
        before = prompt_tokens_computed(llm)
        llm.generate([PREFIX + tail for tail in TAILS[1:]], GREEDY)
        shared = len(PREFIX) // 16 * 16
        assert prompt_tokens_computed(llm) - before == sum(len(PREFIX) + len(tail) - shared for tail in TAILS[1:])
