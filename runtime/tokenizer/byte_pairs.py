"""BPE from a mapped file: what the runtime uses of `tokenizers.Tokenizer`, with no vocabulary to build."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import tokenizers

from ...backends.contract.byte_pairs import BYTE_PAIRS_NAME, BytePairsHeader
from ...backends.library import BytePairTables, merge_byte_pairs
from .errors import TokenizerLoadError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Encoded(NamedTuple):
    ids: list[int]


class BytePairs:
    """The library still splits the text, finds added tokens and adds bos and eos; the merging is ours.

    Its own BPE model, which has only single characters here, leaves every word as one token per character, or as what
    stands for a character that the vocabulary lacks: its bytes, or the unknown token.
    """

    def __init__(self, path: Path) -> None:
        """Raises TokenizerLoadError where the file cannot be read, or is damaged."""
        try:
            with path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = BytePairsHeader.unpack(memoryview(self._memory))
            sections = header.sections()
            offset, size = sections.pop("splitter")
            self._splitter = tokenizers.Tokenizer.from_buffer(self._memory[offset : offset + size])
            arrays = {name: self._array(name, *place) for name, place in sections.items()}
            _check(header, arrays, self._splitter)
        except Exception as error:  # the library raises plain Exception
            raise TokenizerLoadError(f"{path}: cannot be used ({error}); export the model again") from error
        self._num_ids = header.num_ids
        self._text, self._text_end, self._by_text = arrays["text"], arrays["text_end"], arrays["by_text"]
        self._tables = BytePairTables(
            **{name: array.ctypes.data for name, array in arrays.items()},
            num_words=header.num_words,
            whole_words=header.whole_words,
        )

    def _array(self, name: str, offset: int, size: int) -> NDArray[Any]:
        dtype = np.dtype("u1" if name == "text" else "<u4")
        return np.frombuffer(self._memory, dtype, size // dtype.itemsize, offset)

    @classmethod
    def of_package(cls, folder: Path) -> Self | None:
        """None where the package has no such file. Raises as the constructor does."""
        path = folder / BYTE_PAIRS_NAME
        return cls(path) if path.is_file() else None

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        encoding = self._splitter.encode(text, add_special_tokens=add_special_tokens)
        # None, which bos and eos have for a word, becomes NaN: a word of its own
        return Encoded(merge_byte_pairs(self._tables, encoding.ids, np.array(encoding.word_ids, np.float64)))

    def id_to_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self._num_ids:
            return None
        return self._spelling(token_id).decode() or None

    def token_to_id(self, token: str) -> int | None:
        if (found := self._splitter.token_to_id(token)) is not None:
            return found
        wanted = token.encode()
        at = bisect_left(self._by_text, wanted, key=self._spelling)
        if at == len(self._by_text) or self._spelling(self._by_text[at]) != wanted:
            return None
        return int(self._by_text[at])

    def _spelling(self, token_id: Any) -> bytes:
        start = self._text_end[token_id - 1] if token_id > 0 else 0
        return self._text[start : self._text_end[token_id]].tobytes()

    # --- as the library has it ------------------------------------------------------------------------------------
    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return self._num_ids

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        added: dict[int, Any] = self._splitter.get_added_tokens_decoder()
        return added

    @property
    def decoder(self) -> Any:
        return self._splitter.decoder

    @property
    def model(self) -> Any:
        return self._splitter.model

    def no_truncation(self) -> None:
        """The exporter has left it out."""

    def no_padding(self) -> None:
        """The exporter has left it out."""


def _check(header: BytePairsHeader, arrays: dict[str, Any], splitter: tokenizers.Tokenizer) -> None:
    """What the tables and the splitter refer to is there: the native code follows them blindly."""
    first, end = arrays["first"], arrays["text_end"]
    good = (
        first[0] == 0
        and first[-1] == header.num_pairs
        and (first[:-1] <= first[1:]).all()
        and (end[:-1] <= end[1:]).all()
        and (end[-1] if len(end) else 0) == header.text_bytes
        and all((arrays[name] < header.num_ids).all() for name in ("right", "product", "by_text"))
        and all(i < header.num_ids for i in splitter.get_vocab().values())
    )
    if not good:
        raise ValueError("its tables contradict each other")
