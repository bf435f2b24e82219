"""SentencePiece model files, trained here, against the sentencepiece wheel."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from trivet.exporters.tokenizer import TokenizerBuildError, build_tokenizer
from trivet.exporters.tokenizer.sentencepiece import _model_class, load_sentencepiece

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and then the other dogs run after the fox through the long grass.",
    "There is a small house near the river where an old man reads his books in the morning and writes letters.",
    "Der schnelle braune Fuchs springt über den faulen Hund; größer, schöner, weiter, höher und immer wieder von vorn.",
    "Le renard brun saute par-dessus le chien paresseux, et les élèves étudient à l'école près de la rivière en été.",
    "1234 5678 90 12.5 % of 3,000 (about 42) = 1 + 1; x = y * z - 7 / 8, and 2026-11-29 is a date.",
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz   THEäöüßéèà1234567890.,;()\t漢字🙂Ж½ﬁÅ"


def train(folder: Path, **options: Any) -> Path:
    prefix = folder / "trained"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_prefix=str(prefix),
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    path = prefix.with_suffix(".model")
    return path.rename(folder / "tokenizer.model")


BPE = {"model_type": "bpe", "vocab_size": 500, "byte_fallback": True, "normalization_rule_name": "identity"}
UNIGRAM = {"model_type": "unigram", "vocab_size": 420, "byte_fallback": True}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**BPE, "remove_extra_whitespaces": False},
    "no prefix": {**BPE, "remove_extra_whitespaces": False, "add_dummy_prefix": False},
    "trimmed": {**BPE, "remove_extra_whitespaces": True},
    "nfkc": {**BPE, "normalization_rule_name": "nmt_nfkc", "byte_fallback": False, "vocab_size": 300},
    "digits": {**BPE, "split_digits": True, "remove_extra_whitespaces": False},
    "unigram": {**UNIGRAM, "normalization_rule_name": "nmt_nfkc"},
    "unigram identity": {**UNIGRAM, "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_equal_sentencepiece(kind: str, tmp_path: Path) -> None:
    path = train(tmp_path, **KINDS[kind])
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer, bos, eos = load_sentencepiece(path)
    assert (bos, eos) == (1, 2)
    generator = random.Random(11)
    # The library maps combining marks per grapheme where sentencepiece maps the longest match (see _normalizers).
    alphabet = ALPHABET if "nfkc" in KINDS[kind]["normalization_rule_name"] else ALPHABET + "\u0301"
    words = " ".join(CORPUS).split(" ")
    texts = ["", " ", "   ", " the", "the ", "  the  fox ", "\n", "a\n\nb\tc", *CORPUS]
    texts += ["".join(generator.choices(alphabet, k=generator.randint(1, 30))) for _ in range(400)]
    texts += [" ".join(generator.choices(words, k=6)) for _ in range(100)]
    ties = 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected = oracle.encode(text)
        if KINDS[kind]["model_type"] == "unigram" and ids != expected:
            # Two segmentations of the same likelihood: sentencepiece adds in float32, the library in float64.
            assert sum(map(oracle.get_score, ids)) == pytest.approx(sum(map(oracle.get_score, expected)), abs=1e-4)
            ties += 1
        else:
            assert ids == expected, text
        if KINDS[kind]["byte_fallback"]:
            assert tokenizer.decode(ids) == oracle.decode(expected), text
    assert ties < len(texts) / 50


def test_user_defined_and_control_pieces(tmp_path: Path) -> None:
    path = train(tmp_path, **KINDS["no prefix"], user_defined_symbols=["<tool>", "\n\n"], control_symbols=["<ctl>"])
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer, _, _ = load_sentencepiece(path)
    for text in ("<tool>the fox<tool>\n\nx\n", "the<tool> <tool>dog", "\n\n\n"):
        assert tokenizer.encode(text, add_special_tokens=False).ids == oracle.encode(text)
    control = oracle.piece_to_id("<ctl>")
    assert (
        tokenizer.encode("a<ctl>b", add_special_tokens=False).ids.count(control) == 1
    )  # the library itself never does
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert control in special and oracle.piece_to_id("<tool>") not in special


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train(tmp_path, **KINDS["llama"])
    return tmp_path


def test_folder_with_only_a_model_file(folder: Path, tokenizer_source: Any, load: Any) -> None:
    tokenizer = load(build_tokenizer(tokenizer_source(kind="safetensors", directory=folder)))
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert tokenizer.spec.bos_token == "<s>" and tokenizer.eos_token_ids == [2]
    assert tokenizer.encode("the fox") == [1, *oracle.encode("the fox")]
    assert tokenizer.decode(tokenizer.encode("the 🙂 fox")) == "the 🙂 fox"
    assert tokenizer.longest_token_bytes == max(len(oracle.id_to_piece(i).encode()) for i in range(oracle.vocab_size()))


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({"add_bos_token": False}, "the", ["\u2581the"]),
        ({"add_eos_token": True}, "the", ["<s>", "\u2581the", "</s>"]),
        ({"legacy": True}, "</s>the", ["<s>", "</s>", "\u2581the"]),
        ({"legacy": False}, "the</s>the", ["<s>", "\u2581the", "</s>", "the"]),
        ({"add_prefix_space": False}, " the", ["<s>", "\u2581the"]),
        ({"bos_token": "</s>"}, "the", ["</s>", "\u2581the"]),
    ],
)
def test_settings_of_tokenizer_config(
    settings: Any, text: str, expected: list[str], folder: Path, tokenizer_source: Any, load: Any
) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load(build_tokenizer(tokenizer_source(kind="safetensors", directory=folder)))
    pieces = [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]
    joined = "".join(p for p in pieces if p)
    assert joined == "".join(expected)
    assert [p for p in pieces if p in ("<s>", "</s>")] == [p for p in expected if p in ("<s>", "</s>")]


def rewritten(path: Path, change: Any) -> None:
    model = sentencepiece_proto(path)
    change(model)
    path.write_bytes(model.SerializeToString())


def sentencepiece_proto(path: Path) -> Any:
    model = _model_class()()
    model.ParseFromString(path.read_bytes())
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.trainer_spec, "model_type", 3), "model_type is WORD"),
        (lambda m: setattr(m.trainer_spec, "treat_whitespace_as_suffix", True), "treat_whitespace_as_suffix"),
        (lambda m: setattr(m.normalizer_spec, "escape_whitespaces", False), "escape_whitespaces is false"),
        (lambda m: setattr(m.trainer_spec, "bos_id", 9999), "bos_id is 9999"),
        (lambda m: setattr(m.pieces[0], "type", 1), "UNKNOWN"),
        (lambda m: setattr(m.pieces[5], "piece", m.pieces[6].piece), "occur twice"),
        (lambda m: m.ClearField("pieces"), "no pieces"),
    ],
)
def test_models_that_cannot_be_built(change: Any, message: str, folder: Path, tokenizer_source: Any) -> None:
    rewritten(folder / "tokenizer.model", change)
    with pytest.raises(TokenizerBuildError, match=message):
        build_tokenizer(tokenizer_source(kind="safetensors", directory=folder))


def test_damaged_model_file(folder: Path, tokenizer_source: Any) -> None:
    path = folder / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:1001])
    with pytest.raises(TokenizerBuildError, match="not a SentencePiece model"):
        build_tokenizer(tokenizer_source(kind="safetensors", directory=folder))
