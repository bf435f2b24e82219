"""The tools beside compare.py: growth, limits, random models, the peers' setup and the many-core run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


def rates(**engines: float | None) -> dict[str, Any]:
    """A cell's result with these medians; None: unsupported."""
    return {
        "engines": {
            name: {"unsupported": "no"} if rate is None else {"tokens_per_second": {"median": rate}}
            for name, rate in engines.items()
        },
        "limit": {"tokens_per_second": 50.0},
    }


# --- growth -----------------------------------------------------------------------------------------------------------
def test_thread_counts(load: Any) -> None:
    growth = load("growth")
    assert [growth.thread_counts(most) for most in (1, 2, 6, 16)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8, 16)]


def test_parallel_efficiency_is_bounded_by_the_bandwidth(load: Any) -> None:
    decode = {
        "1": rates(trivet=20.0, peer=10.0),
        "4": rates(trivet=45.0, peer=20.0),
        "2": rates(trivet=36.0, peer=None),
    }
    assert load("growth").parallel_efficiency(decode) == {
        "trivet": {"1": 1.0, "2": pytest.approx(0.9), "4": pytest.approx(0.9)},  # 45 of 50, not of 80
        "peer": {"1": 1.0, "4": pytest.approx(0.5)},
    }


def test_growth_is_set_beside_the_limits_of_as_many_threads(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    growth, measure = load("growth"), load("measure")
    cost = {"weight_bytes_per_token": 1e9, "kv_bytes_per_token": 0, "body_macs_per_token": 1e9}
    loaded = {"cost": cost | {"head_macs_per_token": 0}}
    running: Any = contextlib.nullcontext(([], {"trivet": loaded}))
    runs = {"trivet": measure.Runs(rates=[5.0], noises=[0.0], answers=[{}])}
    monkeypatch.setattr(growth, "running", lambda *arguments, **settings: running)
    monkeypatch.setattr(growth, "measure_cell", lambda *arguments, **settings: runs)
    limits = {n: {"read_gbps": {"median": 10.0 * int(n)}, "int8_gops": {"median": 20.0 * int(n)}} for n in "12"}
    args = growth._parse(["--model", "m", "--thread-counts", "1,2", "--lengths", "128", "--threads", "1"])
    result = growth._grow_model([], {}, limits, args)
    assert [result["decode"][n]["limit"]["tokens_per_second"] for n in "12"] == [10.0, 20.0]
    assert result["prefill"]["128"]["limit"]["tokens_per_second"] == 10.0


@pytest.mark.parametrize("flag", ["--rounds", "--thread-counts", "--lengths"])
def test_growth_refuses_what_is_no_number(load: Any, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("growth").main(["--model", "m", flag, "0"])
    assert f"argument {flag}: '0': expected a whole number, 1 or more" in capsys.readouterr().err


def test_times_that_are_plotted(load: Any) -> None:
    growth = load("growth")
    model = {
        "decode": {"1": rates(trivet=20.0), "2": rates(trivet=40.0)},
        "prefill": {"128": rates(trivet=64.0, peer=None), "256": rates(trivet=64.0, peer=128.0)},
    }
    assert growth.decode_times(model) == {"trivet": {1: 50.0, 2: 25.0}}
    assert growth.prefill_times(model) == {"trivet": {128: 2.0, 256: 4.0}, "peer": {256: 2.0}}


# --- limits -----------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_limits_of_this_machine(load: Any) -> None:
    """Every rate is a positive number, or null where the CPU or the system does not offer the instruction."""
    limits = load("limits")
    found = limits.measure_limits(1, repetitions=1, mebibytes=4)
    for name in limits._RATES:
        rate = found["1"][name]
        assert rate is None or 0 < rate["min"] <= rate["median"] <= rate["max"], name
    flags = next(
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
    )
    if "amx_int8" not in flags:
        assert found["1"]["amx_int8_gops"] is None
    assert found["1"]["read_gbps"]["median"] > 0


# --- random models ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q4_k", "q6_k", "bf16"])
def test_random_blocks_have_the_weights_of_a_fresh_model(load: Any, kind: str) -> None:
    rows = load("random_gguf").random_rows(kind, 64, 1024, np.random.default_rng(1))
    weights = gguf.dequantize(rows, getattr(gguf.GGMLQuantizationType, kind.upper()))
    assert weights.shape == (64, 1024)
    assert abs(weights.mean()) < 0.003
    assert weights.std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mix", ["q4_0", "q8_0", "q4_k_m", "bf16"])
def test_a_random_model_is_read_by_trivet(load: Any, tmp_path: Path, mix: str, tied: bool) -> None:
    from trivet.exporters.checkpoint import open_checkpoint

    module = load("random_gguf")
    shape = module.ModelShape("qwen3", "qwen2", 8, 256, 512, 4, 2, 64, 1000, 4096, 1e6, 1e-6, True, tied)
    module.write_model(shape, mix, tmp_path / "m.gguf", name="m")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    formats = {checkpoint.tensors[f"blk.{layer}.ffn_down.weight"].format for layer in range(8)}
    assert ("output.weight" in checkpoint.tensors) == (not tied)
    checkpoint.close()
    assert {str(getattr(item, "value", item)).lower() for item in formats} == {
        "q4_0": {"q4_0"}, "q8_0": {"q8_0"}, "q4_k_m": {"q4_k", "q6_k"}, "bf16": {"bf16"},
    }[mix]  # fmt: skip


# --- peers ------------------------------------------------------------------------------------------------------------
def test_what_setup_made_is_found(load: Any, tmp_path: Path) -> None:
    cache = load("peer_cache").PeerCache(tmp_path)
    stem = "qwen3-0.6b-random-q8_0"
    assert cache.peer_model("openvino", stem) is None
    cache.export("openvino", "qwen3-0.6b").mkdir(parents=True)
    assert cache.peer_model("openvino", stem) == cache.export("openvino", "qwen3-0.6b")
    assert cache.peer_model("onnxruntime-genai", stem) is None
    assert cache.peer_model("openvino", "another") is None


def test_setup_names_what_failed_and_goes_on(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = load("setup_peers")
    setup = module.Setup(load("peer_cache").PeerCache(tmp_path))
    attempts: list[str] = []

    def install(name: str) -> None:
        attempts.append(name)
        if name == "openvino":
            setup._run(name, sys.executable, "-c", "print('no such wheel'); raise SystemExit(3)")
        setup._cache.environment(name).mkdir(parents=True)

    setup._install = install
    assert setup.run(["openvino", "onnxruntime-genai"], []) == 1
    assert "NOT MADE  environment openvino" in (error := capsys.readouterr().err)
    assert "ended with 3: no such wheel" in error
    again = module.Setup(setup._cache)
    again._install = install
    assert again.run(["onnxruntime-genai"], []) == 0
    assert attempts == ["openvino", "onnxruntime-genai"]  # what was made is not made again
    assert "present   environment onnxruntime-genai" in capsys.readouterr().out


def test_a_cold_first_run_does_not_choose_the_attention_of_llama_cpp(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention is the faster one here; the first run of all takes longer, whatever it is."""
    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    peer = load("peer_llama_cpp").LlamaCpp()
    peer._faster = {}
    runs: list[bool] = []

    def measure(flash_attention: bool) -> dict[str, Any]:
        runs.append(flash_attention)
        return {"seconds": 9.0 if len(runs) == 1 else 1.0 if flash_attention else 2.0}

    assert peer._with_faster_attention(("prefill", 128), measure) == {"seconds": 1.0}
    assert peer._with_faster_attention(("prefill", 128), measure) == {"seconds": 1.0, "flash_attention": True}
    assert peer._with_faster_attention(("decode", 128), measure) == {"seconds": 1.0}
    assert runs == [True, True, False, True, True, False]


def test_list_makes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "setup_peers.py"), "--list", "--cache", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ))
    assert "environment openvino" in done.stdout
    assert "not made, about 300 MB" in done.stdout
    assert not (tmp_path / "cache").exists()


# --- many cores -------------------------------------------------------------------------------------------------------
def test_budget_leaves_out_what_does_not_fit(load: Any) -> None:
    budget = load("many_core").Budget(10.0)
    budget.took("decode", 16, 0.5)  # 8 thread-seconds: 2 s on 4 threads, 8 s on one
    assert budget.allows("m", "decode", 4)
    assert budget.allows("m", "decode", 1)
    budget.took("decode", 16, 1.0)
    assert not budget.allows("m", "decode", 1)
    assert not budget.allows("m", "concurrent", 16)  # never run: 15 s are assumed
    assert budget.skipped == ["m: decode", "m: concurrent"]


def test_stored_wheels_have_the_same_files(load: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/__init__.py", "a = 1\n" * 1000)
    small = wheel.stat().st_size
    load("many_core").store(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("x/__init__.py") == b"a = 1\n" * 1000
    assert wheel.stat().st_size > 5000 > small
    assert [path.name for path in tmp_path.iterdir()] == ["x-1-py3-none-any.whl"]
