"""Tokenizers of GGUF files: byte-level BPE (`gpt2`) and SentencePiece with scores (`llama`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from .build import BuiltTokenizer
from .chat_templates import from_gguf
from .errors import TokenizerBuildError
from .pre_tokenizers import PreTokenizer, pre_tokenizer
from .scores import SpacePrefix, build_scored_bpe, merges_from_scores
from .spec import SpecialIds, implied_end_of_turn, make_spec, set_bos_eos

_OTHER_MODELS = {
    "bert": "WordPiece, of BERT encoders",
    "t5": "Unigram, of T5",
    "rwkv": "RWKV's trie",
    "plamo2": "PLaMo-2's Aho-Corasick tables",
    "gemma4": "Gemma 4's BPE",
    "hybriddna": "DNA k-mers",
    "whitespace": "whitespace BPE",
    "no_vocab": "the file carries no vocabulary",
    "none": "the file carries no vocabulary",
}


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokenizer.ggml.tokens and the arrays that run beside it; index = token id."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def build_from_gguf(metadata: Mapping[str, Any], pre_override: str | None) -> BuiltTokenizer:
    """Tokenizer, spec and templates from GGUF metadata; TokenizerBuildError names the key at fault."""
    model = metadata.get("tokenizer.ggml.model")
    vocabulary = _vocabulary(metadata) if model in ("gpt2", "llama") else None
    if vocabulary is None:
        known = "supported: gpt2 (byte-level BPE), llama (SentencePiece with scores)"
        if model is None:
            raise TokenizerBuildError(f"tokenizer.ggml.model is missing: the GGUF file has no tokenizer; {known}")
        what = f" ({_OTHER_MODELS[model]})" if model in _OTHER_MODELS else ""
        raise TokenizerBuildError(f"tokenizer.ggml.model is {model!r}{what}, which trivet does not build; {known}")
    if model == "gpt2":
        pre = pre_tokenizer(metadata.get("tokenizer.ggml.pre"), pre_override)
        tokenizer = _byte_level(metadata, vocabulary, pre)
        return _finish(metadata, vocabulary, tokenizer, add_bos=pre.add_bos, default_bos=None, default_eos=None)
    if pre_override is not None:
        raise TokenizerBuildError(
            f"--tokenizer-pre {pre_override}: tokenizer.ggml.model is 'llama' (SentencePiece), which uses no "
            "pre-tokenizer. Leave the flag out"
        )
    # The format's defaults for this model: <s> = 1, </s> = 2, <unk> = 0, bos added.
    return _finish(metadata, vocabulary, _scored(metadata, vocabulary), add_bos=True, default_bos=1, default_eos=2)


def _array(metadata: Mapping[str, Any], key: str, count: int | None = None) -> list[Any]:
    value = metadata.get(key)
    if value is None:
        raise TokenizerBuildError(f"{key} is missing from the GGUF metadata")
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        raise TokenizerBuildError(f"{key} holds a {type(value).__name__}, expected an array")
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    if count is not None and len(items) != count:
        raise TokenizerBuildError(f"{key} has {len(items)} entries, but tokenizer.ggml.tokens has {count}")
    return items


def _vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    tokens = [t if isinstance(t, str) else "" for t in _array(metadata, "tokenizer.ggml.tokens")]
    if not tokens:
        raise TokenizerBuildError("tokenizer.ggml.tokens is empty")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]  # the name that llama.cpp gives an empty token
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        first = next(i for i, token in enumerate(tokens) if ids[token] != i)
        raise TokenizerBuildError(
            f"tokenizer.ggml.tokens: ids {first} and {ids[tokens[first]]} are both {tokens[first]!r}"
        )
    types = [int(TokenType.NORMAL)] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _array(metadata, "tokenizer.ggml.token_type", len(tokens))
    return Vocabulary(tokens, types, ids)


def _byte_level(metadata: Mapping[str, Any], vocabulary: Vocabulary, pre: PreTokenizer) -> Tokenizer:
    merges: list[tuple[str, str]] = []
    for rank, line in enumerate(_array(metadata, "tokenizer.ggml.merges")):
        cut = line.find(" ", 1)  # from 1: a merge may begin with a literal space
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in vocabulary.ids or right not in vocabulary.ids or left + right not in vocabulary.ids:
            raise TokenizerBuildError(
                f"tokenizer.ggml.merges[{rank}] is {line!r}: expected two tokens with a space between, that "
                "together are a token"
            )
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges))
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _scored(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    scores = _array(metadata, "tokenizer.ggml.scores", len(vocabulary.tokens))
    mergeable = (TokenType.NORMAL, TokenType.UNUSED)
    pieces = [
        (t, s) for t, s, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True) if kind in mergeable
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(vocabulary.tokens):
        raise TokenizerBuildError(
            f"tokenizer.ggml.unknown_token_id is {unknown}; the vocabulary has {len(vocabulary.tokens)} tokens"
        )
    # llama.cpp puts the space before the text and again after every special token; Prepend acts on each such stretch.
    prefix: SpacePrefix = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise TokenizerBuildError(
            "tokenizer.ggml.remove_extra_whitespaces is true, which trivet does not build for 'llama'"
        )
    return build_scored_bpe(vocabulary.ids, merges_from_scores(pieces), vocabulary.tokens[unknown], prefix)


def _finish(
    metadata: Mapping[str, Any],
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    *,
    add_bos: bool,
    default_bos: int | None,
    default_eos: int | None,
) -> BuiltTokenizer:
    """Special tokens, bos/eos, templates: what both kinds of vocabulary share."""
    marked: list[AddedToken] = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
            marked.append(AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False))
    tokenizer.add_tokens(marked)

    def token_id(name: str, default: int | None = None) -> int | None:
        value: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
        if value is not None and not 0 <= value < len(vocabulary.tokens):
            raise TokenizerBuildError(
                f"tokenizer.ggml.{name}_token_id is {value}; the vocabulary has {len(vocabulary.tokens)} tokens"
            )
        return value

    template, named = from_gguf(metadata)
    explicit_eot = [token_id("eot"), token_id("eom")]
    eos = [i for i in (token_id("eos", default_eos), *explicit_eot) if i is not None]
    eos += implied_end_of_turn(tokenizer, template)
    ids = SpecialIds(
        bos=token_id("bos", default_bos),
        eos=eos,
        pad=token_id("padding"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        chat_templates=named,
    )
    spec = make_spec(tokenizer, ids)
    set_bos_eos(tokenizer, ids.bos if ids.add_bos else None, eos[0] if ids.add_eos else None)
    return BuiltTokenizer(tokenizer, spec, template)
