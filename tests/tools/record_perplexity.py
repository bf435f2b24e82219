#!/usr/bin/env python3
"""Record perplexities of the real models, as transformers computes them in float32: tests/data/perplexity/NAME.json.

    record_perplexity.py MODELS_DIR [NAME ...]

MODELS_DIR holds the NAME-hf directories that `fetch_models.py --hf` writes: the GGUF files' weights, dequantized.
Runs in the oracle environment (extra `oracle`). See perplexity_windows.py for what is measured.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import perplexity_windows as ppl
import torch
import transformers


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def measure(folder: Path) -> dict[str, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = tokenizer(ppl.text(), add_special_tokens=False)["input_ids"]
    starts_with_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    nll, count = 0.0, 0
    for window in ppl.windows(token_ids, tokenizer.bos_token_id if starts_with_bos else None):
        ids = torch.tensor([window])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), -1)
        nll -= float(logprobs.gather(1, ids[0, 1:, None]).sum())
        count += len(window) - 1
    return {
        "perplexity": round(math.exp(nll / count), 5),
        "num_predicted_tokens": count,
        "bos_token_id": tokenizer.bos_token_id if starts_with_bos else None,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "token_ids": token_ids,
    }


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name in sys.argv[2:] or ppl.MODELS:
        result = measure(Path(sys.argv[1], f"{name}-hf"))
        (ppl.DATA / f"{name}.json").write_text(json.dumps(result) + "\n")
        print(name, result["perplexity"], result["num_predicted_tokens"], flush=True)


if __name__ == "__main__":
    main()
