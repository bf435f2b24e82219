"""`trivet bench latency` and `throughput` on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trivet.app.cli import main

Bench = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tiny: Callable[[str, str], Path]) -> Path:
    return tiny("llama", "safetensors")


@pytest.fixture
def bench(model: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    def run(name: str, *flags: Any) -> dict[str, Any]:
        status = main(["bench", name, "-m", str(model), "--json", "--num-threads", "1", *map(str, flags)])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        result: dict[str, Any] = json.loads(captured.out)
        return result

    return run


def test_latency_counts_every_token(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    flags = ["--input-len", 9, "--output-len", 5, "--batch-size", 3, "--num-iters", 4, "--num-iters-warmup", 1]
    result = bench("latency", *flags, "--output-json", path)
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert (result["num_prompt_tokens"], result["num_output_tokens"]) == (27, 15)
    assert result["config"]["engine"]["cache_config"]["enable_prefix_caching"] is False
    assert result["config"]["bench"]["batch_size"] == 3
    assert result["mean_ttft_ms"] < result["mean_e2el_ms"] <= 1e3 * max(result["latencies"])
    assert json.loads(path.read_text()) == result


def test_throughput_counts_every_token(bench: Bench) -> None:
    result = bench("throughput", "--num-prompts", 5, "--input-len", 8, "--output-len", 4)
    assert (result["num_requests"], result["total_input_tokens"], result["total_output_tokens"]) == (5, 40, 20)
    assert result["total_num_tokens"] == 60
    assert result["tokens_per_second"] == pytest.approx(60 / result["elapsed_time"])
    assert result["token_counts_from"] == ["engine"]
    assert result["max_concurrent_requests"] == 5
    assert "mean_itl_ms" not in result  # LLM shows whole answers only


def test_async_engine_shows_the_gaps_between_tokens(bench: Bench) -> None:
    result = bench("throughput", "--num-prompts", 3, "--input-len", 8, "--output-len", 200, "--async-engine")
    assert result["total_output_tokens"] == 600
    assert result["mean_itl_ms"] > 0


def test_prefix_repetition_hits_the_prefix_cache(bench: Bench) -> None:
    flags = ["--dataset-name", "prefix_repetition", "--num-prompts", 4, "--prefix-repetition-num-prefixes", 1]
    flags += ["--prefix-repetition-prefix-len", 32, "--prefix-repetition-suffix-len", 4, "--output-len", 2]
    result = bench("throughput", *flags, "--max-num-seqs", 1)  # one after the other
    assert result["total_cached_tokens"] == 3 * 32


def test_the_seed_of_the_engine_seeds_the_prompts(bench: Bench) -> None:
    result = bench("throughput", "--num-prompts", 1, "--input-len", 4, "--output-len", 1, "--seed", 7)
    assert result["config"]["engine"]["model_config"]["seed"] == 7


def test_a_request_beyond_the_context_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(
        ["bench", "latency", "-m", str(model), "--input-len", "60", "--output-len", "10", "--max-model-len", "64"]
    )
    assert status == 1
    assert "60 prompt tokens and 10 output tokens does not fit the context of 64" in capsys.readouterr().err
