"""Answers for programs: --json of run and complete."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

GREEDY = ("--temperature", 0, "--max-tokens", 12, "--ignore-eos")


def test_run(cli: Any, llama: Path) -> None:
    answer = cli("run", "Hello", "-m", llama, *GREEDY, "--json").json()
    assert set(answer) == {"model", "text", "finish_reason", "usage"} and answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == 12 + answer["usage"]["prompt_tokens"]


def test_complete(cli: Any, llama: Path) -> None:
    by_run = cli("run", "Hello", "-m", llama, *GREEDY, "--raw", "--json")
    result = cli("complete", "Hello", "-m", llama, *GREEDY, "--json", "--stats")
    assert result.status == 0, result.err
    assert result.json() == by_run.json() and "12 tokens]" in result.err
    lines = cli("complete", "-m", llama, *GREEDY, "--json", stdin="Hello\nHello\n").out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == [by_run.json()["text"]] * 2
    refused = cli("complete", "x " * 3000, "-m", llama, "--json")
    assert (refused.status, refused.out) == (2, "") and "max_model_len" in refused.err


def test_complete_from_a_terminal_writes_only_answers(cli: Any, llama: Path) -> None:
    keyboard, terminal = os.openpty()
    try:
        process = cli.start("complete", "-m", llama, *GREEDY, "--json", stdin=terminal)
        os.write(keyboard, b"Hello\n\x04")
        out, err = process.communicate(timeout=60)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert process.returncode == 0, err
    assert out == cli("complete", "Hello", "-m", llama, *GREEDY, "--json").out


def test_complete_behind_a_server(cli: Any, llama: Path) -> None:
    here = cli("complete", "Hello", "-m", llama, *GREEDY, "--json").json()
    with cli.serving(llama, "--served-model-name", "mine") as (url, _):
        there = cli("complete", "Hello", "--url", url, *GREEDY, "--json").json()
    unsaid = here["usage"] | {"cached_tokens": None}
    assert there == here | {"model": "mine", "usage": unsaid}
    with cli.serving(llama, "--served-model-name", "mine", "--enable-prompt-tokens-details") as (url, _):
        there = [cli("complete", "Hello" * 20, "--url", url, *GREEDY, "--json").json() for _ in range(2)]
    assert [answer["usage"]["cached_tokens"] > 0 for answer in there] == [False, True]
