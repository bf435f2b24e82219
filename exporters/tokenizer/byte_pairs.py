"""A `tokenizers` BPE model -> byte_pairs.bin, which opens at once; the library takes long to build 150,000 tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ...backends.contract.byte_pairs import BYTE_PAIRS_NAME, BytePairsHeader

_BYTES = 256


def write_byte_pairs(tokenizer: Tokenizer, folder: Path) -> bool:
    """Write the file if `tokenizer` is of the kind that it can hold: BPE over bytes, without special cases.

    Returns whether it was written.
    """
    whole = json.loads(tokenizer.to_str())
    model, vocab = whole["model"], whole["model"].get("vocab", {})
    if not _is_plain(model):
        return False
    num_ids = max([*vocab.values(), *(token["id"] for token in whole["added_tokens"])]) + 1
    spellings = [(tokenizer.id_to_token(i) or "").encode() for i in range(num_ids)]
    pairs = _pairs(vocab, model["merges"])
    words = sorted((token.encode(), i) for token, i in vocab.items())
    text, splitter = b"".join(spellings), _splitter(whole)
    header = BytePairsHeader(num_ids, len(pairs), len(words), len(text), len(splitter), int(model["ignore_merges"]))
    left, right, rank, product = pairs.T if len(pairs) else np.zeros((4, 0), np.uint32)
    sections: dict[str, Any] = {
        "first": np.searchsorted(left, np.arange(num_ids + 1)).astype("<u4"),
        "right": right.astype("<u4"),
        "rank": rank.astype("<u4"),
        "product": product.astype("<u4"),
        "text_end": np.cumsum([len(spelling) for spelling in spellings]).astype("<u4"),
        "by_text": np.array([i for _, i in words], "<u4"),
        "text": text,
        "splitter": splitter,
    }
    data = bytearray(header.size)
    data[: len(header.pack())] = header.pack()
    for name, (offset, size) in header.sections().items():
        data[offset : offset + size] = bytes(sections[name])
    (folder / BYTE_PAIRS_NAME).write_bytes(data)
    return True


def _is_plain(model: dict[str, Any]) -> bool:
    special = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(model[name] for name in special) or "" in model["vocab"]:
        return False
    return sum(len(token) == 1 for token in model["vocab"]) >= _BYTES or not model["ignore_merges"]


def _pairs(vocab: dict[str, int], merges: list[list[str]]) -> np.ndarray[Any, Any]:
    """[pairs, (left, right, rank, product)], sorted; of a pair that is there twice the last one counts."""
    ranked = {(vocab[a], vocab[b]): (rank, vocab[a + b]) for rank, (a, b) in enumerate(merges)}
    return np.array([(*pair, *ranked[pair]) for pair in sorted(ranked)], np.uint32).reshape(-1, 4)


def _splitter(whole: dict[str, Any]) -> bytes:
    """The same tokenizer with single characters and added tokens for a vocabulary, and nothing to merge."""
    vocab = {token: i for token, i in whole["model"]["vocab"].items() if len(token) == 1}
    vocab |= {token["content"]: token["id"] for token in whole["added_tokens"]}
    model = whole["model"] | {"vocab": vocab, "merges": [], "ignore_merges": False}
    return json.dumps(whole | {"model": model, "truncation": None, "padding": None}).encode()
