"""Tokenizers of Hugging Face folders: tokenizer.json as it is, with what tokenizer_config.json adds to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from .build import BuiltTokenizer
from .chat_templates import from_directory
from .errors import TokenizerBuildError
from .spec import SpecialIds, implied_end_of_turn, make_spec, set_bos_eos, steps

_DECODERS = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")


def build_from_tokenizer_json(directory: Path, config: Mapping[str, Any]) -> BuiltTokenizer:
    """Tokenizer, spec and templates of a folder with tokenizer.json; TokenizerBuildError names the file at fault."""
    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception: malformed JSON, a merge of unknown tokens, ...
        raise TokenizerBuildError(f"{path}: not a tokenizer that can be loaded: {error}") from error
    _check_kind(tokenizer, path)
    # Settings of some training run; a prompt is never cut or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return finish_directory(tokenizer, directory, config)


def _check_kind(tokenizer: Tokenizer, path: Path) -> None:
    if not isinstance(tokenizer.model, models.BPE | models.Unigram):
        kind = type(tokenizer.model).__name__
        raise TokenizerBuildError(f"{path}: model {kind} is not supported; expected BPE or Unigram")
    if isinstance(tokenizer.model, models.BPE) and tokenizer.model.dropout:
        raise TokenizerBuildError(
            f"{path}: model.dropout is {tokenizer.model.dropout}; ids would be random, expected null"
        )
    kinds = [step["type"] for step in steps(tokenizer.decoder, "decoders")]
    if not kinds or any(kind not in _DECODERS for kind in kinds):
        raise TokenizerBuildError(f"{path}: decoder is {kinds or None}; expected steps of {', '.join(_DECODERS)}")


def finish_directory(tokenizer: Tokenizer, directory: Path, config: Mapping[str, Any]) -> BuiltTokenizer:
    """Apply tokenizer_config.json and its companions to `tokenizer`."""
    settings = read_json(directory / "tokenizer_config.json")
    special = {**read_json(directory / "special_tokens_map.json"), **settings}
    named = {name: _content(special.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    _add_tokens(tokenizer, settings, named, directory)

    def token_id(name: str) -> int | None:
        content = named[f"{name}_token"]
        if content is not None:
            found = tokenizer.token_to_id(content)
            if found is not None:
                return found
        value = config.get(f"{name}_token_id")
        return value if isinstance(value, int) else None

    bos, eos = token_id("bos"), token_id("eos")
    if not (directory / "tokenizer.json").is_file():
        # A model file does not say what goes around a text; the classes that read such files put bos in front. Where
        # there is a tokenizer.json its post-processor says it, whatever add_bos_token says (as in transformers 5).
        wants_bos, wants_eos = settings.get("add_bos_token", True), settings.get("add_eos_token", False)
        set_bos_eos(tokenizer, bos if wants_bos else None, eos if wants_eos else None)
    around = tokenizer.encode("", add_special_tokens=True).ids
    template, templates = from_directory(directory, settings)
    generation_eos = eos_ids(read_json(directory / "generation_config.json"))
    # generation_config.json says when to stop; only a folder without it falls back on config.json and the template.
    others = generation_eos or [*eos_ids(config), *implied_end_of_turn(tokenizer, template)]
    ids = SpecialIds(
        bos=bos,
        eos=[*([eos] if eos is not None else []), *others],
        pad=token_id("pad"),
        add_bos=bos is not None and around[:1] == [bos],
        add_eos=eos is not None and around[-1:] == [eos] and around != [bos],
        chat_templates=templates,
    )
    return BuiltTokenizer(tokenizer, make_spec(tokenizer, ids), template)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} without the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerBuildError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerBuildError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def eos_ids(config: Mapping[str, Any]) -> list[int]:
    """`eos_token_id` of a config: an id, a list of ids, or absent."""
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise TokenizerBuildError(f"eos_token_id is {value!r}; expected a token id or a list of them")
    return values


def _content(token: Any) -> str | None:
    """The text of a special token, written as a string or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _add_tokens(
    tokenizer: Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str | None], where: Path
) -> None:
    """Add what tokenizer_config.json declares and tokenizer.json lacks or describes otherwise, as transformers does."""
    present = tokenizer.get_added_tokens_decoder()
    declared = settings.get("added_tokens_decoder") or {}
    wanted: dict[int, AddedToken] = {}
    for key, entry in declared.items():
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "normalized", "single_word", "special")}
        wanted[int(key)] = AddedToken(entry["content"], **flags)
    for token_id, token in sorted(wanted.items()):
        if repr(present.get(token_id)) == repr(token):
            continue
        tokenizer.add_tokens([token])
        if (got := tokenizer.token_to_id(token.content)) != token_id:
            raise TokenizerBuildError(
                f"{where / 'tokenizer_config.json'}: added_tokens_decoder gives {token.content!r} the id {token_id}, "
                f"but in tokenizer.json it has, or would get, the id {got}"
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [content for content in named.values() if content is not None and content not in known]
    tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in missing])
