"""`trivet bench serve` against a server with known delays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trivet.app.cli import main


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """bench(server, *flags) -> (status, result, stderr)."""

    def run(server: Any, *flags: str) -> tuple[int, dict[str, Any], str]:
        status = main(["bench", "serve", "--base-url", server.url, "--json", "--input-len", "8", *flags])
        captured = capsys.readouterr()
        return status, json.loads(captured.out or "{}"), captured.err

    return run


def test_known_delays_come_out_as_the_percentiles(scripted_server: Any, bench: Any) -> None:
    """With room for a busy machine: an event that comes late makes the next gap shorter."""
    server = scripted_server(ttft=0.4, gap=0.1, num_tokens=6)
    status, result, _ = bench(server, "--num-prompts", "4", "--metric-percentiles", "50,99")
    assert status == 0
    assert 400 <= result["p50_ttft_ms"] < 700
    assert 70 <= result["mean_itl_ms"] < 160
    assert 900 <= result["median_e2el_ms"] < 1400
    assert result["mean_tpot_ms"] == pytest.approx((result["mean_e2el_ms"] - result["mean_ttft_ms"]) / 11)
    assert result["p99_ttft_ms"] >= result["p50_ttft_ms"]


def test_token_counts_are_those_of_the_usage(scripted_server: Any, bench: Any) -> None:
    _, result, _ = bench(scripted_server(ttft=0, gap=0), "--num-prompts", "3")
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (3, 120, 36)
    assert result["total_cached_tokens"] == 9
    assert result["token_counts_from"] == ["usage"]
    assert result["output_throughput"] == pytest.approx(36 / result["duration"])


def test_without_usage_the_chunks_are_counted_and_that_is_said(scripted_server: Any, bench: Any) -> None:
    _, result, err = bench(scripted_server(ttft=0, gap=0, sends_usage=False), "--num-prompts", "2")
    assert result["total_output_tokens"] == 12
    assert result["token_counts_from"] == ["chunks"]
    assert "reports no usage" in err


def test_chat_sends_messages_and_its_role_chunk_is_no_token(scripted_server: Any, bench: Any) -> None:
    server = scripted_server(ttft=0.1, gap=0)
    _, result, _ = bench(server, "--num-prompts", "2", "--backend", "openai-chat", "--output-len", "5", "--ignore-eos")
    assert set(server.paths) == {"/v1/chat/completions"}
    body = server.bodies[0]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (5, True, 0.0, True)
    assert len(body["messages"][0]["content"].split()) == 8
    assert body["model"] == "scripted"
    assert result["p50_ttft_ms"] >= 100


def test_max_concurrency_holds(scripted_server: Any, bench: Any) -> None:
    server = scripted_server(ttft=0.02)
    _, result, _ = bench(server, "--num-prompts", "6", "--max-concurrency", "2")
    assert server.most_running == 2
    assert result["max_concurrent_requests"] == 2


def test_request_rate_spreads_the_arrivals(scripted_server: Any, bench: Any) -> None:
    status, result, _ = bench(scripted_server(ttft=0, gap=0), "--num-prompts", "10", "--request-rate", "20")
    assert status == 0
    assert 0.45 <= result["duration"] < 1.5
    assert (result["request_rate"], result["config"]["burstiness"]) == (20.0, 1.0)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"status": 503}, "HTTP 503"),
        ({"breaks_after": 2}, "ended without"),
        ({"num_tokens": 0}, "the answer has no text"),
    ],
)
def test_failures_are_counted_and_shown(scripted_server: Any, bench: Any, script: Any, message: str) -> None:
    status, result, err = bench(scripted_server(ttft=0, gap=0, **script), "--num-prompts", "2")
    assert status == 1
    assert (result["completed"], result["failed"]) == (0, 2)
    assert all(message in error for error in result["errors"])
    assert message in err


def test_warm_up_requests_are_not_measured(scripted_server: Any, bench: Any) -> None:
    server = scripted_server(ttft=0, gap=0)
    _, result, _ = bench(server, "--num-prompts", "2", "--num-warmups", "3")
    assert len(server.bodies) == 5
    assert result["completed"] == 2


def test_result_files(scripted_server: Any, bench: Any, tmp_path: Path) -> None:
    server = scripted_server(ttft=0, gap=0)
    saving = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.jsonl", "--append-result"]
    for _ in range(2):
        bench(server, "--num-prompts", "2", *saving, "--save-detailed", "--metadata", "commit=abc", "--label", "x")
    first, second = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert first["commit"] == second["commit"] == "abc"
    assert first["output_lens"] == [12, 12]
    assert [len(gaps) for gaps in first["itls"]] == [5, 5]
    assert first["config"]["random_input_len"] == 8
    assert first["model_id"] == "scripted"


def test_goodput_limits(scripted_server: Any, bench: Any) -> None:
    _, kept, _ = bench(scripted_server(ttft=0, gap=0), "--num-prompts", "2", "--goodput", "ttft:5000", "e2el:9000")
    _, broken, _ = bench(scripted_server(ttft=0.05, gap=0), "--num-prompts", "2", "--goodput", "ttft:10")
    assert kept["request_goodput"] == kept["request_throughput"]
    assert broken["request_goodput"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--percentile-metrics", "ttft,foo"], "'foo'"),
        (["--metric-percentiles", "101"], "from 0 to 100"),
        (["--goodput", "itl:3"], "'itl:3'"),
        (["--append-result"], "--append-result needs --save-result"),
        (["--prompt-format", "token-ids"], "needs --tokenizer"),
        (["--backend", "openai-chat", "--prompt-format", "token-ids"], "a chat message is text"),
        (["--metadata", "x"], "KEY=VALUE"),
        (["--request-rate", "0"], "--request-rate"),
        (["--dataset-name", "sharegpt", "--dataset-path", "missing.json"], "--input-len does not go with"),
        (["--speed", "3"], "unknown flag --speed"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_sent(
    scripted_server: Any, bench: Any, flags: list[str], message: str
) -> None:
    server = scripted_server()
    status, _, err = bench(server, *flags)
    assert status == 2
    assert message in err
    assert not server.bodies


def test_a_missing_key_is_said_with_the_variable_that_holds_it(scripted_server: Any, bench: Any) -> None:
    status, result, err = bench(scripted_server(models_status=401))
    assert (status, result) == (1, {})
    assert "/v1/models answers with status 401; the API key is missing or wrong (OPENAI_API_KEY)" in err


def test_no_server_is_one_line(bench: Any) -> None:
    class Nobody:
        url = "http://127.0.0.1:9"

    status, result, err = bench(Nobody())
    assert (status, result) == (1, {})
    assert "no model list at http://127.0.0.1:9" in err
    assert err.count("\n") == 1
