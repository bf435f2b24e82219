"""The comparison runner of bench/: its arithmetic, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
MODULES = ("cells", "compare", "engines", "limits", "noise", "protocol", "startup")


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
    "kv_elements_per_token": 10_000,
    "kv_cache_dtype": "float16",
    "body_macs_per_token": 1_000_000,
    "head_macs_per_token": 500_000,
}
LIMITS = {"read_gbps": {"median": 20.0}, "int8_gops": {"median": 1.0}, "bf16_gflops": None, "fp32_gflops": None}


def cell(bench: ModuleType, name: str) -> object:
    return next(cell for cell in bench.all_cells(bench.Shape()) if cell.name == name)


@pytest.mark.parametrize(
    ("name", "rate", "limit", "share"),
    [
        # 100 MB of weights and 20 kB of KV for each of 128 + 32 tokens, 100 times a second, of 20 GB/s
        ("decode-128", 100.0, "read", 100 * (100e6 + 20e3 * 160) / 20e9),
        # 2 operations per weight and token; the head runs for the last token only
        ("prefill-512", 400.0, "int8", 400 * 2 * (1e6 + 0.5e6 / 512) / 1e9),
        # 128 + 63 tokens pass the body and 64 the head, for 64 that are counted
        ("concurrent-16", 50.0, "int8", 50 * 2 * (1e6 * 191 + 0.5e6 * 64) / 64 / 1e9),
        # the prefix of 1000 counts once for all 16 requests
        ("prefix-cold", 50.0, "int8", 50 * 2 * (1e6 * (24 + 1000 / 16 + 31) + 0.5e6 * 32) / 32 / 1e9),
        ("prefix-warm", 50.0, "int8", 50 * 2 * (1e6 * (24 + 31) + 0.5e6 * 32) / 32 / 1e9),
    ],
)
def test_shares_of_the_limits(bench: ModuleType, name: str, rate: float, limit: str, share: float) -> None:
    assert cell(bench, name).share_of_limit(rate, COST, LIMITS) == (limit, pytest.approx(share))  # type: ignore[attr-defined]


def test_a_machine_without_int8_instructions_has_no_int8_limit(bench: ModuleType) -> None:
    found = cell(bench, "prefill-512").share_of_limit(1.0, COST, {**LIMITS, "int8_gops": None})  # type: ignore[attr-defined]
    assert found is None


def test_ratios_are_taken_within_a_round(bench: ModuleType) -> None:
    own, peer = bench.Runs(), bench.Runs()
    own.rates, own.noises, own.answers = [10.0, 20.0, 40.0], [0.0, 0.0, 0.5], [{}, {}, {}]
    peer.rates, peer.noises, peer.answers = [5.0, 20.0, 10.0], [0.0, 0.0, 0.0], [{}, {}, {}]
    result = bench._cell_result(cell(bench, "decode-128"), {"trivet": own, "llama-cpp": peer}, COST, LIMITS)
    assert result["ratios"]["llama-cpp"] == {"min": 1.0, "median": 2.0, "max": 4.0}
    assert result["trivet"]["noisy"] is True
    assert result["llama-cpp"]["noisy"] is False
    assert result["trivet"]["tokens_per_second"] == {"min": 10.0, "median": 20.0, "max": 40.0}


def test_every_engine_gets_the_same_ordinary_tokens(bench: ModuleType) -> None:
    protocol = importlib.import_module("protocol")
    first = protocol.token_ids(2000, 7, 49152)
    assert first == protocol.token_ids(2000, 7, 200_000) != protocol.token_ids(2000, 8, 49152)
    assert min(first) >= 1000
    assert max(first) < 30000
    assert len(set(first)) > 1800
    with pytest.raises(ValueError, match="too small"):
        protocol.token_ids(1, 0, 2000)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "compare.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer", f"llama={sys.executable}"], "unknown peer 'llama'; known are trivet, llama-cpp, openvino"),
        (["--peer", "llama-cpp=/nowhere/python"], "llama-cpp: /nowhere/python cannot be run"),
        (["--peer", "llama-cpp"], "expected NAME=PYTHON"),
        (["--cells", "decode-1"], "unknown cell 'decode-1'"),
        (["--peer-model", "openvino:m=/nowhere"], "with an existing path"),
        ([], "m.gguf: no such file"),
    ],
)
def test_what_is_not_there_is_refused_by_name(flags: list[str], message: str) -> None:
    done = run("--model", "m.gguf", *flags)
    assert done.returncode != 0
    assert message in done.stderr


def test_an_interpreter_without_the_package_is_refused(bench: ModuleType) -> None:
    spec = bench.EngineSpec("openvino", sys.executable)
    if importlib.util.find_spec("openvino_genai") is not None:
        pytest.skip("openvino_genai is installed here")
    with pytest.raises(bench.EngineError, match="has no package openvino_genai; install it there"):
        spec.check()


def test_a_busy_machine_is_refused_unless_allowed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "idle_noise", lambda seconds: 0.5)
    with pytest.raises(bench.EngineError, match="others use 50% of the machine"):
        bench.refuse_noise(allowed=False)
    assert bench.refuse_noise(allowed=True) == 0.5
