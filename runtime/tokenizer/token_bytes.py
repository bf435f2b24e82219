"""The bytes that each token stands for: what makes decoding additive, and so incremental."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from .errors import TokenizerLoadError

if TYPE_CHECKING:
    from .byte_pairs import BytePairs

SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PER_BYTE = "trivet_replace_per_byte"


def _replace_per_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_PER_BYTE, _replace_per_byte)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


def decoder_steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """The serialised steps of a `tokenizers` decoder, sequences opened."""
    pending = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step["decoders"], *pending]
        else:
            yield step


class TokenBytes:
    """Bytes per token id, found once and kept.

    Two kinds of decoder are understood, and each gives a token the same bytes wherever it stands:
    - byte-level: the characters of a token stand for bytes; added tokens are their text;
    - SentencePiece: U+2581 is a space, `<0xNN>` a byte; at most the start of the text loses spaces.
    Invalid UTF-8 becomes U+FFFD: one per maximal invalid part (byte-level), one per byte (SentencePiece).
    """

    def __init__(self, tokenizer: Tokenizer | BytePairs) -> None:
        """Raises TokenizerLoadError for any other decoder, naming it."""
        self._tokenizer = tokenizer
        self._added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        self.byte_level = False
        self.strip_left = 0  # spaces that the start of a text loses
        self.strips_first_token = False  # Metaspace: the first token loses its U+2581
        kinds = list(decoder_steps(tokenizer.decoder))
        for step in kinds:
            match step["type"]:
                case "ByteLevel":
                    self.byte_level = True
                case "Replace" if step["pattern"] == {"String": SPACE} and step["content"] == " ":
                    pass
                case "ByteFallback" | "Fuse":
                    pass
                case "Strip" if step["content"] == " " and step["stop"] == 0:
                    self.strip_left += step["start"]
                case "Metaspace" if step["replacement"] == SPACE:
                    self.strips_first_token = step["prepend_scheme"] != "never"
                case kind:
                    raise TokenizerLoadError(f"tokenizer.json: decoder {kind} ({step}) is not supported")
        if not kinds:
            raise TokenizerLoadError("tokenizer.json has no decoder; expected ByteLevel, Metaspace or ByteFallback")
        self.errors = "replace" if self.byte_level else _PER_BYTE

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of a token; b"" for an id without a token (models pad their vocabulary)."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._find(token_id)
        return known

    def first(self, token_id: int) -> bytes:
        """Bytes of a token that begins a text."""
        found = self[token_id]
        return found.replace(b" ", b"") if self.strips_first_token and SPACE in self._text(token_id) else found

    def _text(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def _find(self, token_id: int) -> bytes:
        text = self._text(token_id)
        if self.byte_level:
            if token_id not in self._added and all(c in BYTE_OF_CHARACTER for c in text):
                return bytes(BYTE_OF_CHARACTER[c] for c in text)
            return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode()
