"""Prompts: lengths, repeatability, what is refused."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from trivet.app.bench.datasets import (
    SampleRequest,
    TokenIdPrompts,
    WordPrompts,
    add_dataset_flags,
    make_requests,
    settle_dataset,
)
from trivet.app.cli.errors import UsageError
from trivet.app.cli.parser import ArgumentParser

SPECIAL = range(5)


def decode(ids: list[int]) -> str:
    return "".join(f"<{i}>" for i in ids if i not in SPECIAL)


MAKER = TokenIdPrompts(100, lambda text: [len(word) + 5 for word in text.split()], decode)


def parse(*flags: str) -> Namespace:
    parser = ArgumentParser(prog="bench")
    add_dataset_flags(parser, num_prompts=4)
    args = parser.parse_strictly(list(flags))
    settle_dataset(args)
    return args


def ids_of(sample: SampleRequest) -> list[int]:
    assert sample.token_ids is not None
    return sample.token_ids


def test_random_prompts_have_the_asked_lengths_and_no_special_tokens() -> None:
    requests = make_requests(parse("--input-len", "50", "--output-len", "7"), MAKER)
    assert [sample.prompt_len for sample in requests] == [50] * 4
    assert [len(ids_of(sample)) for sample in requests] == [50] * 4
    assert {sample.expected_output_len for sample in requests} == {7}
    assert not {token for sample in requests for token in ids_of(sample)} & set(SPECIAL)


def test_the_seed_decides_the_prompts() -> None:
    def prompts(seed: str) -> list[list[int]]:
        args = parse("--input-len", "9")
        args.seed = int(seed)
        return [ids_of(sample) for sample in make_requests(args, MAKER)]

    assert prompts("1") == prompts("1") != prompts("2")


def test_lengths_vary_within_the_range_ratio() -> None:
    args = parse("--input-len", "100", "--output-len", "10", "--random-range-ratio", "0.5", "--num-prompts", "50")
    lengths = {len(ids_of(sample)) for sample in make_requests(args, MAKER)}
    assert len(lengths) > 10
    assert min(lengths) >= 50
    assert max(lengths) <= 150


def test_random_prefix_is_common_to_all_prompts() -> None:
    requests = make_requests(parse("--input-len", "5", "--random-prefix-len", "20"), MAKER)
    assert len({tuple(ids_of(sample)[:20]) for sample in requests}) == 1
    assert {sample.prompt_len for sample in requests} == {25}
    assert len({tuple(ids_of(sample)) for sample in requests}) == 4


def test_prefix_repetition_spreads_the_prompts_over_the_prefixes() -> None:
    flags = ["--dataset-name", "prefix", "--num-prompts", "7", "--prefix-repetition-num-prefixes", "3"]
    flags += ["--prefix-repetition-prefix-len", "30", "--prefix-repetition-suffix-len", "4", "--output-len", "2"]
    requests = make_requests(parse(*flags), MAKER, extra=3)
    prefixes = [tuple(ids_of(sample)[:30]) for sample in requests]
    assert sorted(prefixes[:7].count(prefix) for prefix in set(prefixes[:7])) == [2, 2, 3]
    assert {sample.prompt_len for sample in requests} == {34}
    assert not set(prefixes[:7]) & set(prefixes[7:])  # warming up leaves the measured prefixes cold


def test_sharegpt_takes_prompt_and_answer_lengths_from_the_file(tmp_path: Path) -> None:
    long, short = "w " * 1025, "a b"
    talks = [("a b c d e", "f g h i"), (long, "f g h i"), (short, "f g h i"), ("p q r s", "t u v w x")]
    entries = [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in talks]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*entries, {"conversations": []}]))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
    requests = make_requests(parse(*flags, "--num-prompts", "2"), MAKER)
    assert sorted((sample.prompt_len, sample.expected_output_len) for sample in requests) == [(4, 5), (5, 4)]
    with pytest.raises(UsageError, match="2 usable conversations; 3 are needed"):
        make_requests(parse(*flags, "--num-prompts", "3"), MAKER)


def test_words_need_no_tokenizer() -> None:
    requests = make_requests(parse("--input-len", "12"), WordPrompts())
    assert all(sample.text is not None and len(sample.text.split()) == 12 for sample in requests)
    assert {sample.prompt_len for sample in requests} == {None}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dataset-name", "sharegpt"), "needs --dataset-path"),
        (("--dataset-path", "x.json"), "--dataset-path does not go with --dataset-name random"),
        (("--prefix-repetition-prefix-len", "3"), "does not go with --dataset-name random"),
        (("--dataset-name", "prefix", "--input-len", "3"), "--input-len does not go with"),
        (("--input-len", "3", "--random-input-len", "3"), "--input-len and --random-input-len are the same"),
        (("--random-range-ratio", "1"), r"expected \[0, 1\)"),
        (("--dataset-name", "prefix_repetition"), "more than the 4 prompts"),
        (("--num-prompts", "0"), "--num-prompts"),
    ],
)
def test_contradicting_flags_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(*flags)
