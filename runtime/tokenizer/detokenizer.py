"""Tokens to text as they arrive: whole characters only, stop strings held back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class TextDecoder:
    """Additive decoding: the texts of `feed`, and `flush` at the end, join to the text of all tokens fed.

    A character is given out with the token that completes it. O(bytes of the token) per call.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool) -> None:
        """`at_start`: the first token begins a text, and loses the space that SentencePiece puts in front of one."""
        self._bytes = tokenizer.token_bytes
        self._check = tokenizer.check_token_id
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=self._bytes.errors)
        self._at_start = at_start
        self._strip_left = self._bytes.strip_left if at_start else 0

    def feed(self, token_id: int) -> str:
        """Text that this token completes, "" if none. Raises InvalidTokenError for an id outside the vocabulary."""
        self._check(token_id)
        data = self._bytes.first(token_id) if self._at_start else self._bytes[token_id]
        self._at_start = False
        return self._strip(self._decoder.decode(data))

    def feed_text(self, text: str) -> str:
        """Put `text` itself in place of a token."""
        self._at_start = False
        return self._strip(self._decoder.decode(text.encode()))

    def flush(self) -> str:
        """End of the text: what is left of an unfinished character, as U+FFFD."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class IncrementalDetokenizer:
    """The growing output text of one request; method names and rules are vLLM's.

    Held back while generation goes on: an unfinished character, and `max(len(stop)) - 1` characters when stop strings
    are to be left out of the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`min_tokens`: stop strings are looked for only in text of tokens after that many."""
        self.output_text = ""
        self.num_output_tokens = 0
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        # Only where added tokens are to be joined raw does it matter which tokens they are.
        raw = not (skip_special_tokens or spaces_between_special_tokens)
        self._raw_added = tokenizer.added_token_ids if raw else frozenset()
        self._last_was_added = False
        self._tokenizer = tokenizer
        self._stop = list(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._hold_back = max((len(s) for s in self._stop), default=1) - 1 if not include_stop_str_in_output else 0
        self._given = 0  # characters of output_text given out as deltas
        self._flushed = False
        self._decoder = self._after_prompt(prompt_token_ids)

    def _after_prompt(self, prompt: Sequence[int]) -> TextDecoder:
        """A decoder that stands after the prompt: mid-text, and mid-character if the prompt ends so."""
        tail: list[int] = []
        num_bytes = 0
        for token_id in reversed(prompt):
            if token_id in self._skipped:
                continue
            tail.append(token_id)
            num_bytes += len(self._tokenizer.bytes_of(token_id))
            if num_bytes >= 4:  # a UTF-8 character has at most 4 bytes
                break
        decoder = TextDecoder(self._tokenizer, at_start=not tail)
        for token_id in reversed(tail):
            decoder.feed(token_id)
        return decoder

    def update(self, new_token_ids: Sequence[int], stop_terminated: bool) -> str | None:
        """Take new tokens; returns the stop string that the text now holds, or None.

        `stop_terminated`: the last of them is a stop token (eos or stop_token_ids), whose text is left out unless
        `include_stop_str_in_output`. After a match `output_text` ends before (or with, if included) the stop string.
        """
        if not new_token_ids:
            return None
        shown = new_token_ids[:-1] if stop_terminated and not self._include_stop else new_token_ids
        search_from = len(self.output_text)
        parts: list[str] = []
        added = 0
        for token_id in shown:
            self.num_output_tokens += 1
            text = self._decode(token_id)
            parts.append(text)
            added += len(text)
            if self.num_output_tokens <= self._min_tokens:
                search_from = len(self.output_text) + added
        self.num_output_tokens += len(new_token_ids) - len(shown)
        self.output_text += "".join(parts)
        return self._cut_at_stop(search_from)

    def _decode(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._raw_added:
            return self._decoder.feed(token_id)
        is_added = token_id in self._raw_added
        raw = is_added and self._last_was_added
        self._last_was_added = is_added
        return (
            self._decoder.feed_text(self._tokenizer.id_to_token(token_id) or "")
            if raw
            else self._decoder.feed(token_id)
        )

    def _cut_at_stop(self, search_from: int) -> str | None:
        """Cut output_text at the first stop string, in the order given, that ends at or after `search_from` + 1."""
        if len(self.output_text) == search_from:
            return None
        for stop in self._stop:
            at = self.output_text.find(stop, max(0, search_from + 1 - len(stop)))
            if at >= 0:
                self.output_text = self.output_text[: at + (len(stop) if self._include_stop else 0)]
                self._flushed = True  # whatever follows the match is not output
                return stop
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The whole text so far (`delta` false), or what is new since the last call.

        `finished`: nothing is held back any more; an unfinished character comes out as U+FFFD, as `decode` gives it.
        """
        if finished and not self._flushed:
            self._flushed = True
            self.output_text += self._decoder.flush()
        end = len(self.output_text) if finished else max(len(self.output_text) - self._hold_back, 0)
        if not delta:
            return self.output_text[:end]
        start, self._given = self._given, max(self._given, end)
        return self.output_text[start:end]
