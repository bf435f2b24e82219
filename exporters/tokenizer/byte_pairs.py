"""A `tokenizers` BPE model -> byte_pairs.bin, which opens at once; the library is slow to build 150,000 tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...backends.contract.byte_pairs import BYTE_PAIRS_NAME, BytePairsHeader

_BYTES = 256


def write_byte_pairs(serialised: str, folder: Path) -> bool:
    """Write the file if the tokenizer is of the kind that it can hold: BPE without special cases, of bytes or of text.

    `serialised`: Tokenizer.to_str(). Returns whether the file was written.
    """
    whole = msgspec.json.decode(serialised)
    model, vocab = whole["model"], whole["model"].get("vocab", {})
    if not _is_plain(model):
        return False
    added = {token["id"]: token["content"].encode() for token in whole["added_tokens"]}
    words = sorted((token.encode(), i) for token, i in vocab.items())
    num_ids = max([*vocab.values(), *added]) + 1
    spellings = [b""] * num_ids
    for spelling, i in words:
        spellings[i] = spelling
    for i, spelling in added.items():
        spellings[i] = spelling
    left, right, rank, product = _pairs(vocab, model["merges"])
    text, splitter = b"".join(spellings), _splitter(whole)
    header = BytePairsHeader(num_ids, len(left), len(words), len(text), len(splitter), int(model["ignore_merges"]))
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
    special = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or any(model[name] for name in special) or "" in model["vocab"]:
        return False
    # A whole word is looked up by the spelling of its characters, so none of them may be missing.
    over_bytes = sum(len(token) == 1 for token in model["vocab"]) >= _BYTES
    lossless = over_bytes and not model["unk_token"] and not model["byte_fallback"]
    return lossless or not model["ignore_merges"]


def _pairs(vocab: dict[str, int], merges: list[list[str]]) -> tuple[np.ndarray[Any, Any], ...]:
    """(left, right, rank, product), sorted by the first two; of a pair that is there twice the last one counts."""
    left = np.fromiter((vocab[a] for a, _ in merges), np.uint64, len(merges))
    right = np.fromiter((vocab[b] for _, b in merges), np.uint64, len(merges))
    product = np.fromiter((vocab[a + b] for a, b in merges), np.uint64, len(merges))
    pair = left << np.uint64(32) | right
    rank = np.argsort(pair, kind="stable")
    rank = rank[np.append(np.diff(pair[rank]) != 0, True)[: len(rank)]]
    return left[rank].astype(np.uint32), right[rank], rank, product[rank]


def _splitter(whole: dict[str, Any]) -> bytes:
    """The same tokenizer with nothing to merge: its vocabulary is single characters, what stands for others, and added
    tokens."""
    model = whole["model"]
    others = {f"<0x{byte:02X}>" for byte in range(_BYTES)} | {model["unk_token"]}
    vocab = {token: i for token, i in model["vocab"].items() if len(token) == 1 or token in others}
    vocab |= {token["content"]: token["id"] for token in whole["added_tokens"]}
    model = model | {"vocab": vocab, "merges": [], "ignore_merges": False}
    return json.dumps(whole | {"model": model, "truncation": None, "padding": None}).encode()
