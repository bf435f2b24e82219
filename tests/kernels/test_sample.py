"""Sample against its NumPy reference, in every tier: tokens are equal, log-probabilities within 2e-6."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from trivet.backends.contract.opset import NO_TOKEN

from .reference_sample import (
    Row,
    by_rank,
    distribution,
    log_softmax,
    processed_logits,
    sample,
    sample_inputs,
    sample_outputs,
    uniform,
)
from .single_op import available_tiers, run_op
from .sizes import sized

Array = NDArray[Any]
TIERS = available_tiers()
LOGPROB_BOUND = 2e-6  # absolute, for logits of ordinary size
RANDOM_ROWS = [(1, 4), (5, 40), (33, 100), (500, 300), (4099, 60)]  # (vocab, count)


def run_sample(
    logits: Array,
    rows: list[Row],
    *,
    tier: str,
    max_num_logprobs: int = 0,
    num_threads: int = 2,
    changes: dict[str, Array] | None = None,
) -> dict[str, Array]:
    inputs = sample_inputs(logits, rows, max_num_logprobs) | (changes or {})
    outputs = sample_outputs(len(rows), max_num_logprobs)
    return run_op("Sample", inputs, outputs=outputs, tier=tier, num_threads=num_threads)


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    """Every feature on with some probability, in ranges where it changes something."""

    def some(value: Any, default: Any, probability: float = 0.4) -> Any:
        return value if rng.random() < probability else default

    def ids(n: int) -> list[int]:
        return [int(i) for i in rng.integers(0, vocab, n)]

    return Row(
        temperature=some(float(rng.uniform(0.1, 2.0)), 0.0, 0.8),
        top_p=some(float(rng.uniform(0.05, 0.999)), 1.0),
        min_p=some(float(rng.uniform(0.001, 0.5)), 0.0),
        repetition_penalty=some(float(rng.uniform(0.5, 2.0)), 1.0),
        frequency_penalty=some(float(rng.uniform(-2, 2)), 0.0),
        presence_penalty=some(float(rng.uniform(-2, 2)), 0.0),
        top_k=some(int(rng.integers(1, vocab + 3)), 0),
        seed=int(rng.integers(-(2**63), 2**63)),
        offset=int(rng.integers(0, 2**40)),
        prompt=some(ids(20), []),
        output=some(ids(30), []),
        allowed=some(ids(max(2, vocab // 3)), [], 0.2),
        banned=some(ids(3), [], 0.2),
        bias={int(i): float(rng.uniform(-5, 5)) for i in some(ids(4), [], 0.3)},
        bitmask=some(rng.random(vocab) < 0.7, None, 0.2),
    )


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("vocab", "count"), sized(RANDOM_ROWS, [(1, 4), (5, 10), (33, 20), (500, 20), (4099, 8)]))
def test_tokens_equal_reference(tier: str, vocab: int, count: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((count, vocab)) * rng.uniform(0.3, 6, (count, 1))).astype(np.float32)
    logits[::7] = np.round(logits[::7])  # ties
    rows = [random_row(rng, vocab) for _ in range(count)]
    usable = [s for s in range(count) if np.isfinite(processed_logits(logits[s], rows[s]).max())]
    logits, rows = logits[usable], [rows[s] for s in usable]
    got = run_sample(logits, rows, tier=tier)["sampled_token_ids"]
    expected = [sample(logits[s], rows[s]) for s in range(len(rows))]
    differing = [(s, rows[s]) for s in range(len(rows)) if got[s] != expected[s]]
    assert not differing, differing[0]


@pytest.mark.parametrize("tier", TIERS)
def test_large_vocabulary(tier: str) -> None:
    """Sizes of real models, where blocks, buckets and selection bounds are all in use."""
    rng = np.random.default_rng(5)
    vocab = sized(49152, 8192) + 7
    logits = (rng.standard_normal((12, vocab)) * 3).astype(np.float32)
    rows = [Row(temperature=0.7, seed=s) for s in range(12)]
    changes: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.01}, {"min_p": 0.05}]
    for s, change in enumerate(changes):
        rows[s] = replace(rows[s], **change)
        rows[s + 6] = replace(rows[s], top_p=0.8, temperature=1.5)
    got = run_sample(logits, rows, tier=tier)["sampled_token_ids"]
    assert got.tolist() == [sample(logits[s], rows[s]) for s in range(12)]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("vocab", [1, 7, 500, sized(5000, 1100)])
def test_logprobs_and_ranks(tier: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    wanted = [-1, 0, 1, min(5, vocab), vocab]
    logits = np.round(rng.standard_normal((len(wanted), vocab)) * 8, 1).astype(np.float32)  # with ties
    logits[-1, vocab // 2] = -np.inf if vocab > 1 else 0.0
    rows = [Row(temperature=1.0, seed=s, num_logprobs=n) for s, n in enumerate(wanted)]
    got = run_sample(logits, rows, tier=tier, max_num_logprobs=vocab)
    assert got["sampled_logprobs"][0] == -np.inf and got["sampled_ranks"][0] == -1
    for s, n in enumerate(wanted):
        assert (got["top_token_ids"][s, max(n, 0) :] == -1).all()
        assert (got["top_logprobs"][s, max(n, 0) :] == -np.inf).all()
        if n < 0:
            continue
        token, expected, order = got["sampled_token_ids"][s], log_softmax(logits[s]), by_rank(logits[s])
        assert abs(got["sampled_logprobs"][s] - expected[token]) <= LOGPROB_BOUND
        assert got["sampled_ranks"][s] == int(np.flatnonzero(order == token)[0]) + 1
        assert got["top_token_ids"][s, :n].tolist() == order[:n].tolist()
        np.testing.assert_allclose(got["top_logprobs"][s, :n], expected[order[:n]], rtol=0, atol=LOGPROB_BOUND)


@pytest.mark.parametrize("tier", TIERS)
def test_forced_token_ignores_processing(tier: str) -> None:
    logits = np.arange(40, dtype=np.float32)[None]
    got = run_sample(logits, [Row(forced_token_id=3, banned=[3], num_logprobs=0)], tier=tier)
    assert got["sampled_token_ids"][0] == 3 and got["sampled_ranks"][0] == 37
    assert abs(got["sampled_logprobs"][0] - log_softmax(logits[0])[3]) <= LOGPROB_BOUND


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("vocab", [1, 64, 4099, 40_000])
def test_logits_that_cannot_be_sampled_give_no_token(tier: str, vocab: int) -> None:
    """NaN, +inf or nothing but -inf: that row has no token, whatever it asked for; its neighbours get theirs."""
    rng = np.random.default_rng(13)
    logits = (rng.standard_normal((12, vocab)) * 3).astype(np.float32)
    rows = [Row(temperature=0.8 * (s % 3), seed=s, num_logprobs=min(2, vocab)) for s in range(12)]
    rows[5], rows[7] = Row(forced_token_id=0, num_logprobs=0), Row(temperature=1.0, bias={0: 1.0}, allowed=[0])
    expected = run_sample(logits, rows, tier=tier, max_num_logprobs=min(2, vocab))
    logits[1, vocab // 2], logits[3, -1] = np.nan, np.inf
    logits[5, vocab // 3], logits[7, 0], logits[9], logits[10] = -np.nan, np.nan, -np.inf, np.nan
    got = run_sample(logits, rows, tier=tier, max_num_logprobs=min(2, vocab))
    bad = [1, 3, 5, 7, 9, 10]
    assert [sample(logits[s], rows[s]) for s in bad] == [NO_TOKEN] * 6
    assert got["sampled_token_ids"][bad].tolist() == [NO_TOKEN] * 6
    assert got["sampled_ranks"][bad].tolist() == [-1] * 6 and (got["top_token_ids"][bad] == -1).all()
    assert (got["sampled_logprobs"][bad] == -np.inf).all() and (got["top_logprobs"][bad] == -np.inf).all()
    for name, value in got.items():
        assert np.delete(value, bad, 0).tobytes() == np.delete(expected[name], bad, 0).tobytes(), name


@pytest.mark.parametrize("tier", TIERS)
def test_the_lowest_id_of_the_highest_logits_is_taken(tier: str) -> None:
    logits = np.zeros((3, 40_000), np.float32)
    logits[0, [39_000, 20_000, 17_000]] = 1.0  # threads look through 16384 logits each
    logits[1, [16_384, 16_383]] = 1.0
    logits[2, 39_999] = 1.0
    got = run_sample(logits, [Row(), Row(), Row()], tier=tier)
    assert got["sampled_token_ids"].tolist() == [17_000, 16_383, 39_999]


@pytest.mark.parametrize("tier", TIERS)
def test_rows_do_not_depend_on_each_other(tier: str) -> None:
    rng = np.random.default_rng(11)
    count = sized(16, 5)
    logits = (rng.standard_normal((count, 999)) * 3).astype(np.float32)
    rows = [replace(random_row(rng, 999), num_logprobs=3) for _ in range(count)]
    together = run_sample(logits, rows, tier=tier, max_num_logprobs=3)
    for s in range(count):
        alone = run_sample(logits[s : s + 1], rows[s : s + 1], tier=tier, max_num_logprobs=3, num_threads=1)
        for name, value in alone.items():
            assert value[0].tobytes() == together[name][s].tobytes(), name


def test_tiers_agree_bit_for_bit() -> None:
    rng = np.random.default_rng(12)
    count = sized(64, 8)
    logits = (rng.standard_normal((count, 3001)) * 4).astype(np.float32)
    rows = [replace(random_row(rng, 3001), num_logprobs=2) for _ in range(count)]
    results = [run_sample(logits, rows, tier=tier, max_num_logprobs=2) for tier in TIERS]
    for name in results[0]:
        assert len({r[name].tobytes() for r in results}) == 1, name


def test_draw_depends_on_seed_and_offset_only() -> None:
    logits = np.zeros((3, 4096), np.float32)
    rows = [Row(temperature=1.0, seed=5, offset=9), Row(temperature=0.5, seed=5, offset=9), Row(1.0, seed=6, offset=9)]
    first = run_sample(logits, rows, tier=TIERS[-1])["sampled_token_ids"]
    assert first[0] == first[1] == int(uniform(5, 9) * 4096) and first[2] != first[0]
    again = run_sample(logits[:1], rows[:1], tier=TIERS[-1])["sampled_token_ids"]
    assert again[0] == first[0]


@pytest.mark.parametrize(
    "row",
    [Row(1.0), Row(0.6, top_k=8), Row(1.3, top_p=0.7), Row(1.0, min_p=0.01), Row(0.9, top_k=20, top_p=0.9, min_p=0.02)],
    ids=["plain", "top_k", "top_p", "min_p", "all"],
)
def test_draw_frequencies(row: Row) -> None:
    """Chi-square of many draws; the limit is 5 standard deviations of the statistic, and the seeds are fixed."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal(50).astype(np.float32)
    draws = sized(20_000, 500)
    rows = [replace(row, seed=77, offset=i) for i in range(draws)]
    got = run_sample(np.tile(logits, (draws, 1)), rows, tier=TIERS[-1])["sampled_token_ids"]
    probabilities = distribution(logits, row)
    counts = np.bincount(got, minlength=50)
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    expected = probabilities[kept] * draws
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    assert freedom >= 3
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("tier", TIERS)
def test_top_p_stops_where_its_share_is_reached_exactly(tier: str) -> None:
    """Four equal tokens, top_p = 1/2: the third has exactly half before it and goes; ties keep the lower ids."""
    rows = [Row(1.0, top_p=0.5, seed=s) for s in range(64)]
    got = run_sample(np.zeros((64, 4), np.float32), rows, tier=tier)["sampled_token_ids"]
    assert set(got.tolist()) == {0, 1}


def test_philox_known_answers() -> None:
    """Random123's published vectors for Philox4x32-10 with zero key and counter: 6627e8d5 e169c58d ..."""
    assert uniform(0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) * 2.0**-53


def test_no_rows() -> None:
    got = run_sample(np.zeros((0, 10), np.float32), [], tier=TIERS[0], max_num_logprobs=2)
    assert got["sampled_token_ids"].shape == (0,)


LOGITS = np.linspace(-1, 1, 64, dtype=np.float32)[None].repeat(2, 0)


BAD_CALLS: dict[str, tuple[Callable[[], tuple[Array, list[Row], dict[str, Array]]], str]] = {
    "nothing_left": (lambda: (LOGITS, [Row(), Row(allowed=[3], banned=[3])], {}), r"row 1: no token is left"),
    "bitmask_empty": (lambda: (LOGITS, [Row(), Row(bitmask=np.zeros(64, bool))], {}), r"row 1: no token is left"),
    "temperature": (lambda: (LOGITS, [Row(), Row(float("nan"))], {}), r"temperature of row 1: expected a finite"),
    "negative_temperature": (lambda: (LOGITS, [Row(), Row(-1.0)], {}), r"temperature of row 1: expected 0 or more"),
    "top_p": (lambda: (LOGITS, [Row(), Row(top_p=0.0)], {}), r"top_p of row 1: expected a number in \(0, 1\]"),
    "min_p": (lambda: (LOGITS, [Row(), Row(min_p=1.5)], {}), r"min_p of row 1"),
    "repetition": (lambda: (LOGITS, [Row(), Row(repetition_penalty=0.0)], {}), r"repetition_penalty of row 1"),
    "top_k": (lambda: (LOGITS, [Row(), Row(top_k=-1)], {}), r"top_k of row 1"),
    "offset": (lambda: (LOGITS, [Row(), Row(offset=-1)], {}), r"offset of row 1"),
    "num_logprobs": (lambda: (LOGITS, [Row(), Row(num_logprobs=1)], {}), r"num_logprobs of row 1: expected -1 to 0"),
    "forced": (lambda: (LOGITS, [Row(), Row(forced_token_id=64)], {}), r"forced_token_id of row 1: expected -1 to 63"),
    "history": (
        lambda: (LOGITS, [Row(), Row(prompt=[64])], {}),
        r"token_history of row 1: expected an id from 0 to 63",
    ),
    "allowed": (lambda: (LOGITS, [Row(), Row(allowed=[-1])], {}), r"allowed_token_ids of row 1"),
    "banned": (lambda: (LOGITS, [Row(), Row(banned=[99])], {}), r"banned_token_ids of row 1"),
    "bias": (lambda: (LOGITS, [Row(), Row(bias={99: 1.0})], {}), r"bias_token_ids of row 1"),
    "bias_value": (lambda: (LOGITS, [Row(), Row(bias={9: np.inf})], {}), r"bias_values of row 1"),
    "loc": (
        lambda: (LOGITS, [Row(prompt=[1]), Row(prompt=[2])], {"token_history_loc": np.array([0, 900, 2], np.int32)}),
        r"token_history_loc\[1\]: expected 0 to 2, got 900",
    ),
    "loc_end": (
        lambda: (LOGITS, [Row(), Row()], {"banned_token_ids_loc": np.array([0, 0, 4], np.int32)}),
        r"banned_token_ids_loc: expected 0 first and 0 last",
    ),
    "bitmask_shape": (
        lambda: (LOGITS, [Row(), Row()], {"bitmask": np.zeros((2, 1), np.int32)}),
        r"bitmask: expected shape \[2, 2\], got \[2, 1\]",
    ),
    "max_num_logprobs": (
        lambda: (LOGITS, [Row(), Row()], {"max_num_logprobs": np.array(65, np.int32)}),
        r"max_num_logprobs: expected 0 to 64, got 65",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_inputs_are_named(name: str) -> None:
    make, message = BAD_CALLS[name]
    logits, rows, changes = make()
    with pytest.raises(Exception, match=message):
        run_sample(logits, rows, tier=TIERS[-1], changes=changes)
