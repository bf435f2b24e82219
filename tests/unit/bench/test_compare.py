"""The comparison runner of bench/: its arithmetic, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
MODULES = (
    "cells", "compare", "engines", "fresh", "limits", "measure", "noise", "peer_cache", "protocol", "tables",
)  # fmt: skip


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """bench/compare.py, as its own process sees it."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    yield importlib.import_module("compare")
    for name in MODULES:
        sys.modules.pop(name, None)


COST = {
    "weight_bytes_per_token": 100_000_000,
    "kv_bytes_per_token": 20_000,
    "body_macs_per_token": 1_000_000,
    "head_macs_per_token": 500_000,
}
LIMITS = {"read_gbps": {"median": 20.0}, "int8_gops": {"median": 1.0}, "bf16_gflops": None, "fp32_gflops": None}


def cell(bench: ModuleType, name: str) -> Any:
    return next(cell for cell in bench.all_cells(bench.Shape()) if cell.name == name)


@pytest.mark.parametrize(
    ("name", "limit", "rate"),
    [
        # 20 GB/s for 100 MB of weights and 20 kB of KV for each of 128 + 32 tokens
        ("decode-128", "read", 20e9 / (100e6 + 20e3 * 160)),
        # the 64 tokens up to 8192, of which the first is known: 8127 + 32 on average
        ("decode-8192", "read", 20e9 / (100e6 + 20e3 * 8159)),
        # 2 operations per weight and token; the head runs for the last token only
        ("prefill-512", "int8", 1e9 / (2 * (1e6 + 0.5e6 / 512))),
        # 128 + 63 tokens pass the body and 64 the head, for 64 that are counted
        ("concurrent-16", "int8", 1e9 / (2 * (1e6 * 191 + 0.5e6 * 64) / 64)),
        # the prefix of 1000 counts once for all 16 requests
        ("prefix-cold", "int8", 1e9 / (2 * (1e6 * (24 + 1000 / 16 + 31) + 0.5e6 * 32) / 32)),
        ("prefix-warm", "int8", 1e9 / (2 * (1e6 * (24 + 31) + 0.5e6 * 32) / 32)),
    ],
)
def test_limits(bench: ModuleType, name: str, limit: str, rate: float) -> None:
    assert cell(bench, name).limit(COST, LIMITS) == (limit, pytest.approx(rate))


def test_a_machine_without_int8_instructions_has_no_int8_limit(bench: ModuleType) -> None:
    assert cell(bench, "prefill-512").limit(COST, {**LIMITS, "int8_gops": None}) is None


def test_no_cell_needs_more_than_8192_tokens(bench: ModuleType) -> None:
    assert max(cell.context() for cell in bench.all_cells(bench.Shape())) == 8192


def two_engines(bench: ModuleType) -> dict[str, Any]:
    """trivet and llama-cpp, three rounds; trivet's last one was disturbed."""
    own, peer = importlib.import_module("measure").Runs(), importlib.import_module("measure").Runs()
    own.rates, own.noises, own.answers = [10.0, 20.0, 40.0], [0.0, 0.0, 0.5], [{}, {}, {}]
    peer.rates, peer.noises, peer.answers = [5.0, 20.0, 10.0], [0.0, 0.0, 0.0], [{}, {}, {}]
    return {"trivet": own, "llama-cpp": peer}


def test_ratios_are_taken_within_a_round(bench: ModuleType) -> None:
    result = bench.cell_result(cell(bench, "decode-128"), two_engines(bench), COST, LIMITS)
    assert result["ratios"]["llama-cpp"] == {"min": 1.0, "median": 2.0, "max": 4.0}
    assert result["engines"]["trivet"]["noisy"] is True
    assert result["engines"]["llama-cpp"]["noisy"] is False
    assert result["engines"]["trivet"]["tokens_per_second"] == {"min": 10.0, "median": 20.0, "max": 40.0}
    assert result["limit"]["share"] == pytest.approx(20 / (20e9 / (100e6 + 20e3 * 160)))


class FailingEngine:
    """Answers its first runs, then fails."""

    pid = None

    def __init__(self, bench: ModuleType, name: str, good_runs: int) -> None:
        self.name, self._left, self._error = name, good_runs, bench.EngineError

    def ask(self, operation: str, **request: Any) -> dict[str, Any]:
        self._left -= 1
        if self._left < 0:
            raise self._error(f"{self.name} ended during {operation}")
        return {"seconds": 2.0, "tokens": 64}


def test_a_peer_that_fails_is_left_out_with_its_reason(bench: ModuleType) -> None:
    engines = [FailingEngine(bench, "trivet", 9), FailingEngine(bench, "openvino", 2)]
    runs = bench.measure_cell(cell(bench, "decode-128"), engines, 3, repeats_noisy=False)
    assert runs["trivet"].rates == [32.0, 32.0, 32.0]
    result = bench.cell_result(cell(bench, "decode-128"), runs, COST, LIMITS)
    assert result["engines"]["openvino"] == {"unsupported": "openvino ended during decode"}
    assert result["ratios"] == {}
    with pytest.raises(bench.EngineError, match="trivet ended during decode"):
        bench.measure_cell(cell(bench, "decode-128"), [FailingEngine(bench, "trivet", 1)], 3, repeats_noisy=False)


def test_readme_table(bench: ModuleType) -> None:
    tables = importlib.import_module("tables")
    cells = {
        "decode-128": bench.cell_result(cell(bench, "decode-128"), two_engines(bench), COST, LIMITS),
        "start": {
            "engines": {"trivet": {"seconds": {"median": 0.25}}, "llama-cpp": {"seconds": {"median": 0.5}}},
            "ratios": {"llama-cpp": {"median": 0.5}},
        },
        "memory": {
            "engines": {
                "trivet": {"peak_rss": 2e8, "anonymous": 1e8}, "llama-cpp": {"unsupported": "it said nothing"},
            },
        },
    }  # fmt: skip
    assert tables.markdown({"m.gguf": cells}) == [
        "| cell | trivet | llama.cpp | of the limit |",
        "| --- | --- | --- | --- |",
        "| m.gguf: decode at context 128 | 20 | 10 (2.00x) | 10% read |",
        "| start to first token, s | 0.25 | 0.50 (0.50x) | - |",
        "| peak memory, MB | 200 | - | - |",
        "| of it anonymous, MB | 100 | - | - |",
    ]


def test_a_prefix_cell_is_called_by_its_sizes(bench: ModuleType) -> None:
    cells = [c for c in bench.all_cells(bench.Shape(prefix=50, prefix_requests=3)) if c.operation == "shared_prefix"]
    rows = {c.name: bench.cell_result(c, two_engines(bench), COST, LIMITS) for c in cells}
    lines = importlib.import_module("tables").markdown({"m.gguf": rows})
    assert lines[2].startswith("| m.gguf: 3 questions behind one 50-token prefix, cold | 20 |")
    assert lines[3].startswith("| 3 questions behind one 50-token prefix, cached | 20 |")


def test_of_two_reports_the_later_cell_stays(bench: ModuleType) -> None:
    tables = importlib.import_module("tables")
    first = {"models": [{"model": "a", "cells": {"start": 1, "memory": 2}}]}
    second = {"models": [{"model": "a", "cells": {"start": 3}}, {"model": "b", "cells": {}}]}
    assert tables.merge([first, second]) == {"a": {"start": 3, "memory": 2}, "b": {}}


def test_memory_is_watched_while_it_is_used(bench: ModuleType) -> None:
    """The peak is seen although the memory is given back before the end."""
    fresh = importlib.import_module("fresh")
    code = "x = b'1' * 100_000_000; print('full', flush=True); input(); del x; print('empty', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        with fresh.MemoryWatch(child.pid) as watch:
            assert child.stdout.readline() == "full\n"
            deadline = time.monotonic() + 60
            while watch.most["anonymous"] < 100_000_000 and time.monotonic() < deadline:
                time.sleep(0.01)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "empty\n"
        status = Path(f"/proc/{child.pid}/status").read_text()
        child.communicate("\n", timeout=60)
    now = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))
    assert now < 50_000_000
    assert 100_000_000 < watch.most["anonymous"] <= watch.most["peak_rss"] < 200_000_000


def test_every_engine_gets_the_same_ordinary_tokens(bench: ModuleType) -> None:
    protocol = importlib.import_module("protocol")
    first = protocol.token_ids(2000, 7, 49152)
    assert first == protocol.token_ids(2000, 7, 200_000) != protocol.token_ids(2000, 8, 49152)
    assert min(first) >= 1000
    assert max(first) < 30000
    assert len(set(first)) > 1800
    with pytest.raises(ValueError, match="too small"):
        protocol.token_ids(1, 0, 2000)


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "compare.py"), *arguments]
    environment = {**os.environ, "TRIVET_BENCH_CACHE": str(cache)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer", f"llama={sys.executable}"], "unknown peer 'llama'; known are llama-cpp, onnxruntime-genai"),
        (["--peer", "llama-cpp=/nowhere/python"], "llama-cpp: /nowhere/python cannot be run"),
        (["--peer", "llama-cpp="], "expected NAME or NAME=PYTHON"),
        (["--peer", "llama-cpp"], "run `python bench/setup_peers.py --peer llama-cpp` once"),
        (["--fill", "4096"], "--fill is 4096; expected from 1 to less than --context 4096"),
        (["--cells", "decode-1"], "unknown cell 'decode-1'"),
        (["--rounds", "0"], "argument --rounds: '0': expected a whole number, 1 or more"),
        (["--peer-model", "openvino:m=/nowhere"], "with an existing path"),
        ([], "m.gguf: no such file"),
    ],
)
def test_what_is_not_there_is_refused_by_name(tmp_path: Path, flags: list[str], message: str) -> None:
    done = run(tmp_path, "--model", "m.gguf", *flags)
    assert done.returncode != 0
    assert message in done.stderr


def test_an_interpreter_without_the_package_is_refused(bench: ModuleType) -> None:
    spec = bench.EngineSpec("openvino", sys.executable)
    if importlib.util.find_spec("openvino_genai") is not None:
        pytest.skip("openvino_genai is installed here")
    with pytest.raises(bench.EngineError, match="has no package openvino_genai; install it there"):
        spec.check()


def test_what_an_engine_loads(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GGUF file, what --peer-model names, or the export that setup_peers.py made; else there is a reason."""
    monkeypatch.setenv("TRIVET_BENCH_CACHE", str(tmp_path))
    specs = [bench.EngineSpec(name, "python") for name in ("trivet", "llama-cpp", "openvino", "onnxruntime-genai")]
    gguf, chosen = Path("qwen3-0.6b-random-q8_0.gguf"), {("llama-cpp", "qwen3-0.6b-random-q8_0"): tmp_path / "other"}
    export = tmp_path / "models" / "openvino" / "qwen3-0.6b"
    export.mkdir(parents=True)
    found, missing = bench.find_loads(specs, gguf, chosen)
    assert found == {"trivet": gguf, "llama-cpp": tmp_path / "other", "openvino": export}
    assert missing == {"onnxruntime-genai": "no export of this model; bench/setup_peers.py makes it"}


def test_limits_are_those_of_as_many_threads(bench: ModuleType) -> None:
    limits = {"1": {"of": 1}, "4": {"of": 4}, "16": {"of": 16}}
    assert [bench.limits_of(limits, threads)["of"] for threads in (1, 4, 16, 32)] == [1, 4, 16, 16]


def test_a_busy_machine_is_refused_unless_allowed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("measure"), "idle_noise", lambda seconds: 0.5)
    with pytest.raises(bench.EngineError, match="others use 50% of the machine"):
        bench.refuse_noise(allowed=False)
    assert bench.refuse_noise(allowed=True) == 0.5
