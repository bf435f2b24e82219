"""TokenizerSpec: the tokenizer's facts that the runtime needs, checked against the tokenizer itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, processors

from ...backends.contract.manifest import TokenizerSpec
from .errors import TokenizerBuildError

# Tokens that end a turn in some chat format. A name alone proves nothing: see `implied_end_of_turn`.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<turn|>", "<|eom_id|>", "[EOT]", "<EOT>")

UNBOUNDED = 0  # longest_token_bytes of a tokenizer that may drop input, so that no prompt length can be refused


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids as the metadata gives them; None = the checkpoint names none."""

    bos: int | None
    eos: list[int]  # the tokenizer's own eos first
    pad: int | None
    add_bos: bool
    add_eos: bool
    chat_templates: dict[str, str] = field(default_factory=dict)  # named ones


def implied_end_of_turn(tokenizer: Tokenizer, chat_template: str | None) -> list[int]:
    """Ids of end-of-turn tokens that the metadata implies without an eos/eot key of their own.

    Many files name only the base model's eos (Gemma's `<eos>`), while the chat format ends a turn with another token,
    and generation would run past it. Such a token counts when two facts of the file agree: it is declared as a special
    (control) token, and the file's own chat template writes it. The names alone are never enough.
    """
    if not chat_template:
        return []
    special = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    return [special[name] for name in _END_OF_TURN if name in special and name in chat_template]


def make_spec(tokenizer: Tokenizer, ids: SpecialIds) -> TokenizerSpec:
    """The spec; TokenizerBuildError where an id names no token or `add_bos` has no bos."""

    def text(name: str, token_id: int | None) -> str:
        if token_id is None:
            return ""
        token = tokenizer.id_to_token(token_id)
        if token is None:
            raise TokenizerBuildError(
                f"{name} token id {token_id} is not in the vocabulary, which has {tokenizer.get_vocab_size()} tokens"
            )
        return str(token)

    if ids.add_bos and ids.bos is None:
        raise TokenizerBuildError("the tokenizer says add_bos_token but names no bos token (bos_token_id / bos_token)")
    eos = list(dict.fromkeys(ids.eos))
    if ids.add_eos and not eos:
        raise TokenizerBuildError("the tokenizer says add_eos_token but names no eos token (eos_token_id / eos_token)")
    for token_id in eos:
        text("eos", token_id)
    text("pad", ids.pad)
    return TokenizerSpec(
        bos_token_id=ids.bos,
        eos_token_ids=eos,
        pad_token_id=ids.pad,
        add_bos=ids.add_bos,
        add_eos=ids.add_eos,
        bos_token=text("bos", ids.bos),
        eos_token=text("eos", eos[0] if eos else None),
        longest_token_bytes=longest_token_bytes(tokenizer),
        chat_templates=ids.chat_templates,
    )


def set_bos_eos(tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
    """Make `encode(..., add_special_tokens=True)` put `bos` in front and `eos` behind; None = not."""
    special = {str(tokenizer.id_to_token(i)): i for i in (bos, eos) if i is not None}
    front, back = ([str(tokenizer.id_to_token(i))] if i is not None else [] for i in (bos, eos))
    sequence = [*front, "$A", *back]
    pair = [*sequence, *("$B:1" if s == "$A" else f"{s}:1" for s in sequence)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=sequence, pair=pair, special_tokens=list(special.items())
    )


def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """The most UTF-8 bytes of input that one token can stand for; UNBOUNDED (0) where no number bounds it.

    Byte-level: a token of n alphabet characters is n bytes. SentencePiece: a piece is its UTF-8 length; its U+2581
    counts three bytes, since one typed in the prompt reads like a space. A normaliser that shortens text multiplies
    the bound.
    Not counted, and left out of the prompt's length by the runtime: bytes that a byte-level vocabulary lacks, and white
    space beside added tokens that swallow it.
    """
    factor = _shrink(tokenizer)
    if factor is None or _loses_text(tokenizer):
        return UNBOUNDED
    byte_level = is_byte_level(tokenizer)
    tokens = tokenizer.get_vocab(with_added_tokens=False)
    longest = max((len(t) if byte_level else len(t.encode()) for t in tokens), default=1)
    added = [len(t.content.encode()) * (factor if t.normalized else 1) for t in _added(tokenizer)]
    return max(1, longest * factor, *added)


def _added(tokenizer: Tokenizer) -> Iterable[AddedToken]:
    return tokenizer.get_added_tokens_decoder().values()


def steps(part: Any, key: str) -> Iterator[dict[str, Any]]:
    """The serialised steps of a normaliser, pre-tokenizer or decoder (None = no steps), sequences opened.

    `key` is where a sequence of that kind keeps its members: normalizers, pretokenizers or decoders.
    """
    pending = [] if part is None else [json.loads(part.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step[key], *pending]
        else:
            yield step


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether it works on the byte-level alphabet (GPT-2's 256 stand-in characters)."""
    return any(step["type"] == "ByteLevel" for step in steps(tokenizer.decoder, "decoders"))


def _shrink(tokenizer: Tokenizer) -> int | None:
    """Upper bound of input bytes per normalised byte; None = unbounded (the normaliser deletes text)."""
    factor = 1
    for step in steps(tokenizer.normalizer, "normalizers"):
        match step["type"]:
            case "Prepend" | "ByteLevel":
                pass
            case "NFC":
                factor *= 4  # worst known: 7 bytes (U+1FBE U+0308 U+0301) -> 2
            case "NFKC" | "NFKD":
                factor *= 5  # mathematical letters: 4 bytes -> 1, and composition after that
            case "NFD" | "Lowercase":
                factor *= 3  # Kelvin sign: 3 bytes -> 1
            case "Replace" if "String" in step["pattern"] and step["content"]:
                factor *= max(1, -(-len(step["pattern"]["String"].encode()) // len(step["content"].encode())))
            case _:
                return None
    return factor


def _loses_text(tokenizer: Tokenizer) -> bool:
    """Whether any amount of input can vanish: unknown characters that fuse, or a pre-tokenizer that removes text."""
    for step in steps(tokenizer.pre_tokenizer, "pretokenizers"):
        if step["type"] not in ("ByteLevel", "Metaspace", "Digits", "Split") or step.get("behavior") == "Removed":
            return True
    if is_byte_level(tokenizer):
        return False
    model = tokenizer.model
    fallback = (
        model.byte_fallback if isinstance(model, models.BPE) else json.loads(model.__getstate__())["byte_fallback"]
    )
    return not (fallback and all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)))
