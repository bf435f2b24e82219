"""What is measured, and the limit that each figure is set beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FRESH_CELLS = ("start", "memory")  # of processes of their own; fresh.py


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the cells, in tokens."""

    decode_tokens: int = 64
    concurrent_prompt: int = 128
    concurrent_output: int = 64
    prefix: int = 1000
    prefix_requests: int = 16
    prefix_tail: int = 24
    prefix_output: int = 32


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: an operation of the protocol with its arguments. More tokens per second are better."""

    name: str  # decode-128, prefill-512, concurrent-16, prefix-cold, prefix-warm
    operation: str
    arguments: dict[str, Any]
    seeded: bool = True  # every run has prompts of its own

    def request(self, seed: int) -> dict[str, Any]:
        return {**self.arguments, "seed": seed} if self.seeded else dict(self.arguments)

    def context(self) -> int:
        """The longest sequence."""
        a = self.arguments
        if self.operation == "decode":
            return int(a["context"] + a["tokens"] + 1)
        if self.operation == "prefill":
            return int(a["tokens"] + 1)
        if self.operation == "concurrent":
            return int(a["prompt"] + a["output"])
        return int(a["prefix"] + a["tail"] + a["output"])

    def rate(self, answer: dict[str, Any]) -> float:
        """Tokens per second: of the prompt for prefill, of the answers for all others."""
        tokens = self.arguments["tokens"] if self.operation == "prefill" else answer["tokens"]
        return float(tokens / answer["seconds"])

    def limit(self, cost: dict[str, Any], limits: dict[str, Any]) -> tuple[str, float] | None:
        """(name of the limit, tokens per second that it allows); None where the machine lacks the instruction."""
        if self.operation == "decode":
            context = self.arguments["context"] + self.arguments["tokens"] / 2
            read = cost["weight_bytes_per_token"] + cost["kv_bytes_per_token"] * context
            return "read", limits["read_gbps"]["median"] * 1e9 / read
        peaks = {"int8": limits["int8_gops"], "AMX int8": limits.get("amx_int8_gops")}
        rates = {name: peak["median"] for name, peak in peaks.items() if peak is not None}
        if not rates:
            return None
        name = max(rates, key=lambda peak: rates[peak])
        return name, rates[name] * 1e9 / self._operations(cost)

    def _operations(self, cost: dict[str, Any]) -> float:
        """Matrix operations (multiplications and additions) for one counted token, attention left out."""
        body, head, a = cost["body_macs_per_token"], cost["head_macs_per_token"], self.arguments
        if self.operation == "prefill":
            return float(2 * (body + head / a["tokens"]))
        prompt = a["prompt"] if self.operation == "concurrent" else a["tail"]
        shared = 0 if self.operation == "concurrent" or a["warm"] else a["prefix"] / a["requests"]
        return float(2 * (body * (prompt + shared + a["output"] - 1) + head * a["output"]) / a["output"])


def all_cells(shape: Shape) -> list[Cell]:
    """In the order in which they are run."""
    cells = [Cell(f"prefill-{n}", "prefill", {"tokens": n}) for n in (128, 512, 2048)]
    for context in (128, 2048, 8192):
        # the last one ends at 8192 tokens, the longest that some models can hold; the others begin there
        begin = context - shape.decode_tokens - 1 if context == 8192 else context
        arguments = {"context": begin, "tokens": shape.decode_tokens}
        cells.append(Cell(f"decode-{context}", "decode", arguments, seeded=False))
    for requests in (4, 8, 16):
        lengths = {"prompt": shape.concurrent_prompt, "output": shape.concurrent_output}
        cells.append(Cell(f"concurrent-{requests}", "concurrent", {"requests": requests, **lengths}))
    prefix = {"requests": shape.prefix_requests, "prefix": shape.prefix, "tail": shape.prefix_tail}
    for warm in (False, True):
        arguments = {**prefix, "output": shape.prefix_output, "warm": warm}
        cells.append(Cell("prefix-warm" if warm else "prefix-cold", "shared_prefix", arguments))
    return cells
