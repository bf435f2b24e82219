"""`byte_pairs.bin` of a model package: a BPE vocabulary as arrays that are used where the file is mapped.

Little-endian, every section at a multiple of 8 bytes, in the order of `sections`:
  first      u32 [num_ids + 1]  the pairs whose left half is token i are [first[i], first[i + 1])
  right      u32 [num_pairs]    their right halves, ascending per left half
  rank       u32 [num_pairs]    lower ones are merged first
  product    u32 [num_pairs]    the token that a pair becomes
  text_end   u32 [num_ids]      token i is spelled text[text_end[i - 1] : text_end[i]], UTF-8; nothing = there is none
  by_text    u32 [num_words]    tokens of the model's vocabulary in the order of their spelling
  text       u8  [text_bytes]
  splitter   u8  [splitter_bytes]  a tokenizer.json without tokens of several characters: it does all but merge
"""

from __future__ import annotations

import struct
from typing import Final, Self

import msgspec

BYTE_PAIRS_NAME: Final = "byte_pairs.bin"
_MAGIC: Final = b"TRIVETB1"
_HEADER: Final = struct.Struct("<8s6I")


class BytePairsHeader(msgspec.Struct, frozen=True):
    """The beginning of the file: 8 bytes that name the format, then these numbers as u32."""

    num_ids: int  # added tokens included
    num_pairs: int
    num_words: int
    text_bytes: int
    splitter_bytes: int
    whole_words: int  # 1 = a word of the vocabulary is one token, whatever the merges would make of it

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Self:
        """Raises ValueError where `data` is no such file, or not a whole one."""
        if len(data) < _HEADER.size or bytes(data[: len(_MAGIC)]) != _MAGIC:
            raise ValueError("not a vocabulary of byte pairs")
        header = cls(*_HEADER.unpack_from(data)[1:])
        if header.size != len(data):
            raise ValueError(f"a vocabulary of {header.size} bytes is {len(data)} bytes long")
        return header

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, *msgspec.structs.astuple(self))

    def sections(self) -> dict[str, tuple[int, int]]:
        """Name -> (offset, bytes)."""
        sizes = {
            "first": 4 * (self.num_ids + 1),
            "right": 4 * self.num_pairs,
            "rank": 4 * self.num_pairs,
            "product": 4 * self.num_pairs,
            "text_end": 4 * self.num_ids,
            "by_text": 4 * self.num_words,
            "text": self.text_bytes,
            "splitter": self.splitter_bytes,
        }
        offset, found = _HEADER.size, {}
        for name, size in sizes.items():
            found[name] = (offset, size)
            offset += -(-size // 8) * 8
        return found

    @property
    def size(self) -> int:
        """Of the whole file, in bytes."""
        offset, size = self.sections()["splitter"]
        return offset + -(-size // 8) * 8
