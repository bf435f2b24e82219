"""How perplexity is measured here, for the recorder and for the tests alike.

The text is tokenized without special tokens and cut into windows of 512 tokens without overlap; models that start a
text with bos get it before each window. Every token with a token before it in its window counts.
"""

from __future__ import annotations

from pathlib import Path

WINDOW = 512
DATA = Path(__file__).resolve().parent.parent / "data" / "perplexity"
MODELS = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b")  # names of models.json


def text() -> str:
    return (DATA / "text.txt").read_text()


def windows(token_ids: list[int], bos: int | None) -> list[list[int]]:
    prefix = [] if bos is None else [bos]
    return [prefix + token_ids[i : i + WINDOW] for i in range(0, len(token_ids), WINDOW)]
