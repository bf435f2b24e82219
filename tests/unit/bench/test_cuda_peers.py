"""cuda_peers.py with programs that only say what the real ones would."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SPOKEN = {
    "llama-bench": "print(json.dumps([{'avg_ts': ts} for ts in ((100.0, 300.0) if '2048' in sys.argv else (50.0,))]))",
    "llama-batched-bench": 'print("warm-up"); print(json.dumps({"speed_tg": 800.0})); print()',
    "llama-completion": "print('  '); print('word')",
}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    for name, body in SPOKEN.items():
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
        path.chmod(0o755)
    return tmp_path


def test_figures_of_llama_cpp(load: Any, programs: Path) -> None:
    module = load("cuda_peers")
    engines = module.Engines(programs, None)
    assert engines.llama(Path("m.gguf")) == {
        "prefill_tokens_per_s": 300.0,
        "decode_tokens_per_s": 50.0,
        "decode_64_tokens_per_s": 800.0,
    }
    start = engines.start_llama(Path("m.gguf"))
    assert 0 < start["first_token_s"] <= start["end_s"]
    assert engines.failures == []


def test_a_program_that_fails_is_named_and_leaves_no_figures(load: Any, programs: Path) -> None:
    module = load("cuda_peers")
    (programs / "llama-bench").write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no device')\n")
    (programs / "llama-batched-bench").unlink()
    (programs / "llama-completion").write_text(f"#!{sys.executable}\nprint(' ')\n")
    engines = module.Engines(programs, None)
    assert engines.llama(Path("m.gguf")) == {}
    assert engines.start_llama(Path("m.gguf")) == {}
    assert "llama-bench ended with status 1: no device" in engines.failures[0]
    assert any("No such file" in failure for failure in engines.failures)
    assert "llama-completion ended with status 0" in engines.failures[-1]


def test_the_table_has_ratios_bars_and_what_was_not_measured(load: Any, tmp_path: Path) -> None:
    module = load("cuda_peers")
    report = module.Report(tmp_path / "out.json", ["x failed"], minutes=60)
    own = {"decode_tokens_per_s": 300.0, "decode_gb_per_s": 1.0, "copy_gb_per_s": 4000.0, "prefill_tflops": 282.0}
    for _ in range(2):
        report.add(
            "models", "llama3.1-8b-q8_0", {"trivet": lambda: own, "llama.cpp": lambda: {"decode_tokens_per_s": 200.0}}
        )
    starts = {"trivet": lambda: {"first_token_s": 1.0}, "llama.cpp": lambda: {"first_token_s": 2.0}}
    report.add("start", "llama3.1-8b-q4_k_m", starts)
    late = module.Report(tmp_path / "late.json", [], minutes=-1)
    late.add("models", "llama3.2-1b-q8_0", starts)
    lines = report.table().splitlines()
    assert "| llama3.1-8b-q8_0 | decode | 300 tokens/s | 200 tokens/s | 1.50 | 1.25 |" in lines
    assert "| llama3.1-8b-q8_0 | decode 64 | - | - | - |  |" in lines
    assert "| llama3.1-8b-q4_k_m | start | 1 s | 2 s | 2.00 | 1.0 |" in lines
    assert lines[-1] == "FAILED x failed"
    assert "NOT MEASURED for time: models: llama3.2-1b-q8_0" in late.table()
    assert len(json.loads((tmp_path / "out.json").read_text())["models"]["llama3.1-8b-q8_0"]["trivet"]) == 2
