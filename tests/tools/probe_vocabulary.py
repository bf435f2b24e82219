"""A vocabulary on which the splits of every pre-tokenizer show, made from SmolLM2's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Joins across what the pre-tokenizers cut differently (Ċ is a newline, Ġ a space): without a token for both sides
# together, a cut between them would go unseen.
_JOINS = (
    "Ċ /",
    "/ Ċ",
    ". Ċ",
    ", Ċ",
    ") Ċ",
    "Ċ Ċ",
    "Ċ #",
    "r P",
    "e C",
    "e2 0",
    "t 2",
    "f (",
    "( x",
    "Ġ 1",
    "' s",
    '" :',
)


def probe_vocabulary(source: Mapping[str, Any]) -> dict[str, list[Any]]:
    """tokens, token_type and merges of `source` (GGUF metadata) with numbers up to four digits and some joins added."""
    tokens: list[str] = list(source["tokenizer.ggml.tokens"])
    merges: list[str] = list(source["tokenizer.ggml.merges"])
    known = set(tokens)

    def add(left: str, right: str) -> None:
        if left in known and right in known and left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")

    for length in (2, 3, 4):
        for value in range(10**length):
            number = f"{value:0{length}d}"
            add(number[:-1], number[-1])
    for join in _JOINS:
        left, right = join.split(" ")
        add(left, right)
    types = list(source["tokenizer.ggml.token_type"])
    return {"tokens": tokens, "token_type": types + [1] * (len(tokens) - len(types)), "merges": merges}
