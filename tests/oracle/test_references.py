"""The recorded references are what the oracles say today: transformers, llama.cpp, sentencepiece."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.oracle
REFERENCES = sorted(path.stem for path in (Path(__file__).parent.parent / "data" / "references").glob("*.json"))


@pytest.mark.parametrize("name", REFERENCES)
def test_transformers_answers_as_recorded(reference: Callable[[str], dict[str, Any]], name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import record_references
    from tiny_checkpoints import MODELS

    recorded = reference(name)
    loaded = record_references.load(MODELS[recorded["model"]], recorded["weight_type"])
    for case in recorded["cases"]:
        live = record_references.greedy(loaded, case["prompt_token_ids"], len(case["token_ids"]))
        assert live["token_ids"] == case["token_ids"]
        assert live["min_margin"] == pytest.approx(case["min_margin"], abs=1e-4)
        assert dict(live["first_logprobs"]) == pytest.approx(dict(case["first_logprobs"]), abs=1e-4)


# llama.cpp knows no window in its llama architecture, so it cannot answer for mistral.
@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama3", "qwen2", "qwen3", "gemma3", "llama_wide"])
def test_llama_cpp_agrees_on_the_tiny_gguf_files(
    tiny: Callable[[str, str], Path], reference: Callable[[str], dict[str, Any]], name: str
) -> None:
    """Both oracles read our two kinds of file alike: the writers are right, whatever trivet makes of them."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = str(tiny(name, "gguf-f32"))
    model = llama_cpp.Llama(path, n_ctx=1024, n_threads=2, type_k=0, type_v=0, verbose=False)
    for case in reference(name)["cases"]:
        model.reset()
        tokens: list[int] = []
        for token in model.generate(case["prompt_token_ids"], temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(token)
            if len(tokens) == len(case["token_ids"]):
                break
        assert tokens == case["token_ids"]


def test_tokenizer_probes_are_as_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("transformers", "llama_cpp", "sentencepiece"):
        pytest.importorskip(module)
    import record_tokenizer_probes as recorder

    missing = [name for name in recorder.GGUF_FILES.values() if not (recorder.MODELS / name).is_file()]
    if missing or not (recorder.MODELS / "tokenizers").is_dir():
        pytest.skip(
            f"the test cache {recorder.MODELS} lacks {missing or 'tokenizers'}: run tests/tools/fetch_models.py"
        )
    recorded = json.loads(recorder.OUT.read_text())
    monkeypatch.setattr(recorder, "OUT", tmp_path / "probes.json")
    recorder.main()
    assert json.loads(recorder.OUT.read_text()) == recorded
