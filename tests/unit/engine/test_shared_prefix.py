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
    ("options", "again"),
    [
        ({}, 0),
        ({"max_num_batched_tokens": 48}, 0),
        ({"block_size": 7}, 0),
        # Where a step ends shortly before the prefix does, nobody waits for the few tokens of the next one,
        ({"max_num_batched_tokens": 100, "max_num_seqs": 5}, 4 * 3),
        # and a request that computes a part of the prefix itself copies no part of a block.
        ({"max_num_batched_tokens": 64, "long_prefill_token_threshold": 32}, 11),
    ],
    ids=["one_step", "prefix_in_chunks", "block_size_7", "odd_chunks", "threshold"],
)
def test_a_cold_prefix_is_computed_once(
    package: str, toy: types.SimpleNamespace, options: dict[str, Any], again: int
) -> None:
    """`again`: most tokens that are computed more than once."""
    prompts = [PREFIX + tail for tail in TAILS]
    expected = len(PREFIX) + sum(map(len, TAILS))
    for order in (prompts, prompts[::-1], random.Random(0).sample(prompts, len(prompts))):
        with LLM(package, **options) as llm:
            outputs = llm.generate(order, GREEDY)
            assert [o.outputs[0].token_ids for o in outputs] == [toy.greedy(prompt, OUTPUT) for prompt in order]
            assert 0 <= prompt_tokens_computed(llm) - expected <= again


def test_a_warm_prefix_costs_the_tails_only(package: str) -> None:
    with LLM(package) as llm:
        llm.generate([PREFIX + TAILS[0]], GREEDY)
        before = prompt_tokens_computed(llm)
        llm.generate([PREFIX + tail for tail in TAILS[1:]], GREEDY)
        assert prompt_tokens_computed(llm) - before == sum(map(len, TAILS[1:]))


def test_an_answer_is_continued_where_it_ended(package: str, toy: types.SimpleNamespace) -> None:
    """The last token of an answer has not been computed; all before it has, also in a block that is not full."""
    with LLM(package) as llm:
        answer = llm.generate([PREFIX], GREEDY)[0].outputs[0].token_ids
        history = [*PREFIX, *answer]
        follow_up = llm.generate([[*history, 50, 51]], GREEDY)[0]
        assert follow_up.num_cached_tokens == len(history) - 1
        assert follow_up.outputs[0].token_ids == toy.greedy([*history, 50, 51], OUTPUT)
        assert llm.generate([PREFIX], GREEDY)[0].num_cached_tokens == len(PREFIX) - 1
        assert llm.generate([{"prompt_token_ids": PREFIX, "cache_salt": "x"}], GREEDY)[0].num_cached_tokens == 0


def test_a_block_is_copied_although_it_is_given_out(package: str, toy: types.SimpleNamespace) -> None:
    """In a pool that is hardly larger than one request the block that is copied may be the next one to be reused."""
    prompts = [[*PREFIX[: 16 * 3 + 9], *tail] for tail in TAILS]
    with LLM(package, num_gpu_blocks_override=7, max_model_len=96) as llm:
        for prompt in [*prompts, *prompts]:
            output = llm.generate([prompt], GREEDY)[0]
            assert output.outputs[0].token_ids == toy.greedy(prompt, OUTPUT)
        assert output.num_cached_tokens >= 16 * 3 + 9
