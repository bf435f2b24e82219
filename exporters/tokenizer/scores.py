"""SentencePiece BPE as a `tokenizers` BPE: ranked merges derived from piece scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

SPACE = "\u2581"

# Where a space goes in front: before every stretch between special tokens, before the whole text only, or nowhere.
SpacePrefix = Literal["always", "first", "never"]


def merges_from_scores(pieces: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """Merges whose order gives the segmentation of `pieces` (text, score) by score.

    SentencePiece joins, again and again, the two neighbours that together form the piece of the highest score, the
    leftmost on a tie. So the rank of a merge is the rank of its result, and every way to cut a piece into two pieces is
    a merge. Among the cuts of one piece the longest left part comes first, which is the leftmost join inside a run.
    """
    by_score = sorted(pieces, key=lambda piece: -piece[1])  # stable: the lower id first on a tie
    known = {piece for piece, _ in by_score}
    return [
        (left, right)
        for piece, _ in by_score
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in known and (right := piece[cut:]) in known
    ]


def build_scored_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], unknown: str, space_prefix: SpacePrefix
) -> Tokenizer:
    """A BPE on whole text, spaces as U+2581, characters outside the vocabulary as byte tokens `<0xNN>`."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    set_spaces(tokenizer, space_prefix)
    return tokenizer


def set_spaces(tokenizer: Tokenizer, space_prefix: SpacePrefix, before: Iterable[normalizers.Normalizer] = ()) -> None:
    """Treat spaces as SentencePiece does: normaliser (after the steps `before`), pre-tokenizer and decoder."""
    steps = [*before]
    if space_prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    else:
        steps += [normalizers.Prepend(SPACE)] if space_prefix == "always" else []
        steps += [normalizers.Replace(" ", SPACE)]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    strip = [] if space_prefix == "never" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
