"""Tiny vocabularies for the tiny checkpoints: a byte-level BPE and a SentencePiece-style BPE, from one fixed text.

Deterministic and independent of any library's trainer: the same text always gives the same ids.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

TEXT = (
    "The quick brown fox jumps over the lazy dog, and then the other dogs run after the fox through the long "
    "grass. There is a small house near the river where an old man reads his books in the morning and writes "
    "letters at night. When the rain comes down in the spring, the water of the river rises, and the boats turn "
    "slowly in the wind. What is the answer to the question? It depends on the number of things that you have "
    "seen and the time that you took. I think that we should go there with them, said the teacher, because the "
    "children want to learn how the engine works. A machine reads one token, then another, and in the end it "
    "has a story: 12 kings, 345 ships, 6 storms; not one of them true!"
)
SPACE = "\u2581"  # SentencePiece's mark for a space
REGEXES = {  # pre-tokenizer name in a GGUF file -> its split regex
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id; merges best first; specials are ids that no text produces."""

    kind: str  # "bpe" (byte-level) | "spm" (SentencePiece-style, byte fallback)
    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    specials: tuple[int, ...]
    bos: int
    eos: int
    scores: tuple[float, ...] = ()  # spm only


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte value."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in plain else next(others)) for b in range(256)]


def learn_merges(words: Counter[tuple[str, ...]], count: int) -> list[tuple[str, str]]:
    """`count` BPE merges: the most frequent pair first, ties by text."""
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        words = Counter({_merge(word, best): times for word, times in words.items()})
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for piece in word:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return tuple(out)


@cache
def byte_level_bpe(size: int) -> Vocabulary:
    """256 bytes, merges, and five special tokens at the end: bos, eos, pad, <|im_start|>, <|im_end|>."""
    alphabet = byte_alphabet()
    specials = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
    words = Counter(tuple(alphabet[b] for b in (" " + word).encode()) for word in TEXT.split())
    merges = learn_merges(words, size - 256 - len(specials))
    tokens = (*alphabet, *(a + b for a, b in merges), *specials)
    first = size - len(specials)
    return Vocabulary("bpe", tokens, tuple(merges), tuple(range(first, size)), first, first + 1)


@cache
def sentencepiece_bpe(size: int) -> Vocabulary:
    """<unk>, <s>, </s>, 256 byte tokens, the text's characters, then merged pieces whose score is minus their rank."""
    words = Counter(tuple(SPACE + word) for word in TEXT.split())
    characters = sorted({c for word in words for c in word})
    base = ("<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *characters)
    pieces = [a + b for a, b in learn_merges(words, size - len(base))]
    known = {*characters, *pieces}
    merges = [(p[:i], p[i:]) for p in pieces for i in range(1, len(p)) if p[:i] in known and p[i:] in known]
    scores = (*(0.0 for _ in base), *(-float(i) for i in range(len(pieces))))
    return Vocabulary("spm", (*base, *pieces), tuple(merges), (0, 1, 2), 1, 2, scores)


def _bpe_json(vocabulary: Vocabulary, pre: str) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre == "smollm"}
    split: dict[str, Any] = {"type": "Digits", "individual_digits": True}
    if pre != "smollm":
        split = {"type": "Split", "pattern": {"Regex": REGEXES[pre]}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {**byte_level, "use_regex": True, "trim_offsets": False},
        "decoder": {**byte_level, "use_regex": True},
    }


def _spm_json(vocabulary: Vocabulary, prefix_space: bool) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    bos = vocabulary.tokens[vocabulary.bos]
    sequence = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefix_space else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": sequence,
            "pair": [*sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [vocabulary.bos], "tokens": [bos]}},
        },
        "decoder": {"type": "Sequence", "decoders": steps},
    }


def write_tokenizer_json(vocabulary: Vocabulary, folder: Path, *, pre: str, chat_template: str | None) -> None:
    """tokenizer.json and tokenizer_config.json. `pre`: a GGUF pre-tokenizer name, or "default", "no-prefix" (spm)."""
    spm = vocabulary.kind == "spm"
    pipeline = _spm_json(vocabulary, pre == "default") if spm else _bpe_json(vocabulary, pre)
    added = [
        {"id": i, "content": vocabulary.tokens[i], "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i in vocabulary.specials
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>" if spm else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": spm,
        "byte_fallback": spm,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(vocabulary.tokens) if spm or i not in vocabulary.specials},
        "merges": [list(pair) for pair in vocabulary.merges],
    }
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **pipeline, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.tokens[vocabulary.bos],
        "eos_token": vocabulary.tokens[vocabulary.eos],
        "add_bos_token": spm,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    if spm:
        config["unk_token"] = "<unk>"
    if chat_template:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
