"""What compare.py and its engines say to each other: one JSON object a line, over stdin and stdout.

An engine runs in a process, and often an environment, of its own; this file needs the standard library only. Times are
seconds, token ids are given, every answer is greedy and of exactly the asked length.

    load          model, threads, context            -> version, settings, seconds
    first_token   tokens                             -> {} (a prompt of so many tokens, and one token after it)
    prefill       tokens, seed                       -> seconds (from ids to the first new token; nothing cached)
    decode        context, tokens                    -> seconds, tokens (after `context` tokens; their time left out)
    concurrent    requests, prompt, output, seed     -> seconds, tokens, ttft[], itl[] (all there at once)
    shared_prefix requests, prefix, tail, output, seed, warm -> the same, and prompt_tokens_computed (None = not known)
    memory                                           -> peak_rss, anonymous_rss (bytes)
    cost                                             -> what the machine's limits are compared with (trivet only)
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, Protocol


class Engine(Protocol):
    """One peer. `load` comes first; a request that it cannot do raises NotImplementedError with the reason."""

    def load(self, *, model: str, threads: int, context: int) -> dict[str, Any]: ...

    def first_token(self, *, tokens: int) -> dict[str, Any]: ...

    def prefill(self, *, tokens: int, seed: int) -> dict[str, Any]: ...

    def decode(self, *, context: int, tokens: int) -> dict[str, Any]: ...

    def concurrent(self, *, requests: int, prompt: int, output: int, seed: int) -> dict[str, Any]: ...

    def shared_prefix(
        self, *, requests: int, prefix: int, tail: int, output: int, seed: int, warm: bool
    ) -> dict[str, Any]: ...


def token_ids(count: int, seed: int, vocab_size: int) -> list[int]:
    """The same ids for every engine: a linear congruential sequence over ids that are ordinary in all vocabularies."""
    low, high = 1000, min(vocab_size - 1000, 30000)
    if high <= low:
        raise ValueError(f"a vocabulary of {vocab_size} is too small to be measured with; expected more than 2001")
    state, ids = (seed * 2654435761 + 12345) % 2**31, []
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2**31
        ids.append(low + (state >> 8) % (high - low))
    return ids


def memory() -> dict[str, int]:
    """Bytes of this process."""
    names = {"VmHWM": "peak_rss", "RssAnon": "anonymous_rss"}
    found = {}
    with open("/proc/self/status") as status:
        for line in status:
            key, _, value = line.partition(":")
            if key in names:
                found[names[key]] = int(value.split()[0]) * 1024
    return found


def serve(engine: Engine) -> None:
    """Answer requests until stdin ends. What libraries print goes to stderr, the answers alone to stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            answer = memory() if operation == "memory" else getattr(engine, operation)(**request)
        except NotImplementedError as error:
            answer = {"unsupported": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
