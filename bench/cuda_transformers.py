"""transformers with torch in bfloat16 on a CUDA device, for cuda_peers.py: random weights in the shape of a model.

    cuda_transformers.py SHAPE [--compile]        e.g. llama3.1-8b

Prints one JSON object: tokens/s of a 2048-token prompt, of decoding 1 and 64 sequences, and the device's speed of a
large bfloat16 product and of a copy. `--compile` decodes one sequence through torch.compile and a static cache instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from random_gguf import SHAPES, ModelShape

_CLASSES = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}


def make_model(shape: ModelShape) -> Any:
    config = _CLASSES[shape.architecture](
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.rms_eps,
        tie_word_embeddings=shape.tied,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()


def median_seconds(run: Callable[[], Any], repeats: int, warm_up: int = 2) -> float:
    times = []
    for _ in range(warm_up + repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[warm_up:])


def random_ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(300, 100000, (batch, tokens), device="cuda")


def decode_seconds(model: Any, batch: int, context: int, steps: int) -> float:
    """Seconds of one token for every sequence, with the answer's argmax fed back."""
    cache = transformers.DynamicCache(config=model.config)
    state = {"ids": model(random_ids(batch, context), past_key_values=cache, logits_to_keep=1).logits.argmax(-1)}

    def step() -> None:
        state["ids"] = model(state["ids"], past_key_values=cache, logits_to_keep=1).logits.argmax(-1)

    return median_seconds(step, steps, 5)


def compiled_decode_seconds(model: Any, context: int, steps: int) -> float:
    cache = transformers.StaticCache(config=model.config, max_cache_len=context + steps + 64)
    model(random_ids(1, context), past_key_values=cache, logits_to_keep=1)
    compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    ids, position = random_ids(1, 1), torch.tensor([context], device="cuda")

    def step() -> None:
        ids.copy_(compiled(ids, past_key_values=cache, cache_position=position, logits_to_keep=1).logits.argmax(-1))
        position.add_(1)

    return median_seconds(step, steps, 8)


def limits() -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = median_seconds(lambda: torch.matmul(a, b), 20, 5)
    source = torch.randint(0, 255, (1 << 30,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), 20, 5)
    return {"product_tflops": 2 * 8192**3 / product / 1e12, "copy_gb_per_s": 2 * (1 << 30) / copy / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    torch.set_grad_enabled(False)
    if not arguments.compile:
        result |= limits()
    model = make_model(SHAPES[arguments.shape])
    if arguments.compile:
        result["decode_tokens_per_s"] = 1 / compiled_decode_seconds(model, 512, 60)
    else:
        prompt = random_ids(1, 2048)
        result["prefill_tokens_per_s"] = 2048 / median_seconds(lambda: model(prompt, logits_to_keep=1), 5)
        result["decode_tokens_per_s"] = 1 / decode_seconds(model, 1, 512, 40)
        result["decode_64_tokens_per_s"] = 64 / decode_seconds(model, 64, 256, 20)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
