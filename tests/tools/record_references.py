#!/usr/bin/env python3
"""Record what transformers (float32, eager attention) answers on the tiny checkpoints: tests/data/references/*.json.

    record_references.py [--out DIR] [NAME[.WEIGHT_TYPE] ...]

Runs in the oracle environment (extra `oracle`). Each reference holds prompts and their greedy continuations as token
ids, the smallest gap between the best two logits on the way, and the log-probabilities of the first step. Prompts
whose gap is below MIN_MARGIN are drawn again: float32 rounding cannot change the tokens of what is kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_checkpoints import MODELS, Tiny, effective_weights, weights_digest
from tiny_writers import hf_config, write_safetensors_file

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "data" / "references"
PROMPT_LENGTHS = (1, 3, 7, 16, 17, 33, 64, 120)
LONG_PROMPT = 700
NUM_TOKENS = 48
NUM_LOGPROBS = 20
MIN_MARGIN = 2e-3
EXTRA_TYPES = {  # beside float32 for every model
    "llama": ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"),
    "llama_wide": ("q4_k", "q5_k", "q6_k"),
}


def all_references() -> list[str]:
    return [*MODELS, *(f"{name}.{kind}" for name, kinds in EXTRA_TYPES.items() for kind in kinds)]


def load(model: Tiny, weight_type: str, overrides: dict[str, Any] | None = None) -> Any:
    """The transformers model with exactly these weights; RuntimeError if a tensor was missing or left over."""
    weights = effective_weights(model, weight_type)
    with tempfile.TemporaryDirectory() as folder:
        tensors = {name: ("F32", w.shape, w.tobytes()) for name, w in weights.items()}
        write_safetensors_file(Path(folder, "model.safetensors"), tensors)
        config = hf_config(model, "f32") | (overrides or {})
        Path(folder, "config.json").write_text(json.dumps(config))
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {key: value for key, value in info.items() if value}
    if problems or len(loaded.model.layers) != model.num_hidden_layers:
        raise RuntimeError(f"{model.name}: not the intended model: {problems}, {len(loaded.model.layers)} layers")
    return loaded.eval()


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def greedy(loaded: Any, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Greedy continuation with the model's own KV cache."""
    ids, past = torch.tensor([prompt]), None
    tokens: list[int] = []
    margins: list[float] = []
    first: torch.Tensor | None = None
    for _ in range(num_tokens):
        out = loaded(input_ids=ids, past_key_values=past, use_cache=True)
        past, logits = out.past_key_values, out.logits[0, -1]
        if first is None:
            first = torch.log_softmax(logits.double(), -1)
        best = torch.topk(logits, 2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        ids = torch.tensor([[tokens[-1]]])
    assert first is not None
    top = torch.topk(first, NUM_LOGPROBS)
    return {
        "prompt_token_ids": prompt,
        "token_ids": tokens,
        "min_margin": round(min(margins), 5),
        "first_logprobs": [[int(i), round(float(v), 6)] for v, i in zip(top.values, top.indices, strict=True)],
    }


def draw_prompt(model: Tiny, length: int, attempt: int) -> list[int]:
    """Any ids, special tokens included; the first is the family's bos or not, as drawn."""
    random = np.random.RandomState(zlib.crc32(f"{model.name}/{length}/{attempt}".encode()))
    return [int(i) for i in random.randint(0, model.vocab_size, length)]


def record(name: str) -> dict[str, Any]:
    model_name, _, weight_type = name.partition(".")
    model, weight_type = MODELS[model_name], weight_type or "f32"
    loaded = load(model, weight_type)
    lengths = PROMPT_LENGTHS if weight_type == "f32" else PROMPT_LENGTHS[3::2]
    if name == "llama":
        lengths = (*lengths, LONG_PROMPT)
    cases = []
    for length in lengths:
        attempt = 0
        while (case := greedy(loaded, draw_prompt(model, length, attempt), NUM_TOKENS))["min_margin"] < MIN_MARGIN:
            attempt += 1
        cases.append(case)
    if weight_type == "f32":
        check_intended(model, cases)
    return {
        "model": model_name,
        "weight_type": weight_type,
        "weights_sha256": weights_digest(effective_weights(model, weight_type)),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "cases": cases,
    }


def check_intended(model: Tiny, cases: list[dict[str, Any]]) -> None:
    """Configuration classes take unknown names silently: prove that window and rope scaling change the answer."""
    variants: list[dict[str, Any]] = []
    if model.sliding_window:
        variants.append({"sliding_window": 4096})
        variants.append({"sliding_window": model.sliding_window + 1})
    if model.rope_scaling:
        variants.append({"rope_scaling": None})
    if model.family == "gemma3":
        variants.append({"rope_local_base_freq": model.rope_theta})
        variants.append({"sliding_window_pattern": 2, "layer_types": None})
    other_rope: dict[str, Any] = {"rope_theta": 123.0}
    if model.new_style_config:
        other_rope = {"rope_parameters": {"rope_type": "default", **other_rope}}
    variants.append(other_rope)
    for overrides in variants:
        other = load(model, "f32", overrides)
        answers = [greedy(other, case["prompt_token_ids"], NUM_TOKENS)["token_ids"] for case in cases]
        differ = sum(a != case["token_ids"] for a, case in zip(answers, cases, strict=True))
        print(f"  {model.name} with {overrides}: {differ} of {len(cases)} cases differ")
        if not differ:
            raise RuntimeError(f"{model.name}: {overrides} changes nothing: the recorded model is not the intended one")


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    cli.add_argument("--out", type=Path, default=DEFAULT_OUT)
    args = cli.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # transformers is renaming past_key_values
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or all_references():
        reference = record(name)
        cases = reference.pop("cases")
        head = json.dumps(reference, indent=1)[:-2]
        lines = ",\n".join("  " + json.dumps(case) for case in cases)
        (args.out / f"{name}.json").write_text(f'{head},\n "cases": [\n{lines}\n ]\n}}\n')
        print(f"{name}: {len(cases)} cases, smallest margin {min(c['min_margin'] for c in cases)}", flush=True)


if __name__ == "__main__":
    main()
