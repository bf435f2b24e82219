"""Tokenizers of folders that have only a SentencePiece `tokenizer.model`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers

from .build import BuiltTokenizer
from .errors import TokenizerBuildError
from .huggingface import finish_directory, read_json
from .scores import SpacePrefix, build_scored_bpe, merges_from_scores, set_spaces

_UNIGRAM, _BPE = 1, 2
_MODEL_TYPES = {1: "UNIGRAM", 2: "BPE", 3: "WORD", 4: "CHAR"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# The fields of SentencePiece's ModelProto that decide about ids: message -> (name, number, type, default).
_FIELDS: dict[str, tuple[tuple[str, int, str, str], ...]] = {
    "Piece": (("piece", 1, "string", ""), ("score", 2, "float", "0"), ("type", 3, "int32", "1")),
    "Trainer": (
        ("model_type", 3, "int32", "1"),
        ("treat_whitespace_as_suffix", 24, "bool", "false"),
        ("byte_fallback", 35, "bool", "false"),
        ("unk_id", 40, "int32", "0"),
        ("bos_id", 41, "int32", "1"),
        ("eos_id", 42, "int32", "2"),
        ("pad_id", 43, "int32", "-1"),
    ),
    "Normalizer": (
        ("name", 1, "string", ""),
        ("precompiled_charsmap", 2, "bytes", ""),
        ("add_dummy_prefix", 3, "bool", "true"),
        ("remove_extra_whitespaces", 4, "bool", "true"),
        ("escape_whitespaces", 5, "bool", "true"),
    ),
}


@cache
def _model_class() -> Any:
    """The protobuf class of a model file, from `_FIELDS`; fields that are not listed are skipped when parsing."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="trivet_sentencepiece.proto", package="trivet_sp", syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            value = kinds.Type.Value(f"TYPE_{kind.upper()}")
            message.field.add(name=field, number=number, type=value, label=kinds.LABEL_OPTIONAL, default_value=default)
    model = file.message_type.add(name="Model")
    members = (("pieces", 1, "Piece", kinds.LABEL_REPEATED), ("trainer_spec", 2, "Trainer", kinds.LABEL_OPTIONAL))
    for field, number, kind, label in (*members, ("normalizer_spec", 3, "Normalizer", kinds.LABEL_OPTIONAL)):
        model.field.add(name=field, number=number, type=kinds.TYPE_MESSAGE, label=label, type_name=f".trivet_sp.{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("trivet_sp.Model"))


def build_from_sentencepiece(directory: Path, config: Mapping[str, Any]) -> BuiltTokenizer:
    """Tokenizer, spec and templates of a folder with tokenizer.model; TokenizerBuildError names what is at fault."""
    path = directory / "tokenizer.model"
    tokenizer, bos, eos = load_sentencepiece(path, _space_prefix(read_json(directory / "tokenizer_config.json")))
    with_ids = {"bos_token_id": bos, "eos_token_id": eos, **config}
    return finish_directory(tokenizer, directory, with_ids)


def _space_prefix(settings: Mapping[str, Any]) -> SpacePrefix:
    if settings.get("add_prefix_space") is False:
        return "never"
    # "legacy": false is transformers' later rule, a space before the whole text only. SentencePiece itself knows no
    # special tokens inside a text; llama.cpp and the earlier rule put a space after each of them.
    return "first" if settings.get("legacy") is False else "always"


def load_sentencepiece(path: Path, space_prefix: SpacePrefix = "always") -> tuple[Tokenizer, int | None, int | None]:
    """(tokenizer, bos id, eos id) of a model file. `space_prefix` holds where the file asks for a dummy prefix."""
    model = _model_class()()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise TokenizerBuildError(f"{path}: not a SentencePiece model (protobuf does not parse)") from error
    _check(model, path)
    pieces = [(p.piece, p.score) for p in model.pieces]
    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise TokenizerBuildError(f"{path}: {len(pieces) - len(vocab)} of {len(pieces)} pieces occur twice")
    unknown = next((i for i, p in enumerate(model.pieces) if p.type == _UNKNOWN), None)
    if unknown is None:
        raise TokenizerBuildError(f"{path}: no piece has the type UNKNOWN; a SentencePiece model needs one")
    normalizer = model.normalizer_spec
    prefix: SpacePrefix = space_prefix if normalizer.add_dummy_prefix else "never"
    if model.trainer_spec.model_type == _BPE:
        usable = [(p.piece, p.score) for p in model.pieces if p.type in (_NORMAL, _UNUSED)]
        tokenizer = build_scored_bpe(vocab, merges_from_scores(usable), pieces[unknown][0], prefix)
    else:
        tokenizer = Tokenizer(models.Unigram(pieces, unknown, model.trainer_spec.byte_fallback))
    set_spaces(tokenizer, prefix, _normalizers(normalizer))
    marked = [p for p in model.pieces if p.type in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(p.piece, special=p.type != _USER_DEFINED, normalized=False) for p in marked])
    bos, eos = (_declared(model, path, name) for name in ("bos_id", "eos_id"))
    return tokenizer, bos, eos


def _check(model: Any, path: Path) -> None:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if not model.pieces:
        raise TokenizerBuildError(f"{path}: not a SentencePiece model (it has no pieces)")
    if trainer.model_type not in (_UNIGRAM, _BPE):
        name = _MODEL_TYPES.get(trainer.model_type, trainer.model_type)
        raise TokenizerBuildError(f"{path}: trainer_spec.model_type is {name}; supported: BPE, UNIGRAM")
    if trainer.treat_whitespace_as_suffix:
        raise TokenizerBuildError(f"{path}: trainer_spec.treat_whitespace_as_suffix is true, which is not supported")
    if not normalizer.escape_whitespaces:
        raise TokenizerBuildError(f"{path}: normalizer_spec.escape_whitespaces is false, which is not supported")


def _normalizers(spec: Any) -> list[normalizers.Normalizer]:
    """The steps before spaces are escaped.

    A character map is applied by `tokenizers` to one grapheme at a time. SentencePiece applies the longest rule that
    matches, so a letter with several combining marks can come out differently (in transformers too).
    """
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return steps


def _declared(model: Any, path: Path, name: str) -> int | None:
    token_id: int = getattr(model.trainer_spec, name)
    if token_id >= len(model.pieces):
        raise TokenizerBuildError(
            f"{path}: trainer_spec.{name} is {token_id}, but there are {len(model.pieces)} pieces"
        )
    return token_id if token_id >= 0 else None
