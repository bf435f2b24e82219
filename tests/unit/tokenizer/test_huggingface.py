"""Folders with tokenizer.json: kept as it is, and what the companions add."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level_bpe, sentencepiece_bpe, write_tokenizer_json
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from trivet.exporters.tokenizer import TokenizerBuildError, build_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer_json(
        byte_level_bpe(400), tmp_path, pre="qwen2", chat_template="{{ messages[0].content }}<|im_end|>"
    )
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**data, **changes}))


def build(source: Any, folder: Path, **config: Any) -> Any:
    return build_tokenizer(source(kind="safetensors", directory=folder, config=config))


def test_tokenizer_json_is_kept(folder: Path, tokenizer_source: Any) -> None:
    built = build(tokenizer_source, folder)
    original = Backend.from_file(str(folder / "tokenizer.json"))
    assert json.loads(built.tokenizer.to_str()) == json.loads(original.to_str())
    assert built.spec.bos_token_id == 395 and not built.spec.add_bos
    assert built.chat_template == "{{ messages[0].content }}<|im_end|>"


def test_sentencepiece_style_tokenizer_json(tmp_path: Path, tokenizer_source: Any, load: Any) -> None:
    write_tokenizer_json(sentencepiece_bpe(400), tmp_path, pre="default", chat_template=None)
    tokenizer = load(build(tokenizer_source, tmp_path))
    assert tokenizer.spec.add_bos and tokenizer.encode("the fox")[0] == 1
    assert tokenizer.decode(tokenizer.encode("the fox 🙂")) == "the fox 🙂"


def test_unigram_with_metaspace(tmp_path: Path, tokenizer_source: Any, load: Any) -> None:
    pieces = [("<unk>", 0.0), ("\u2581", -2.0), ("\u2581the", -1.0), *((c, -3.0) for c in "abcdefgh")]
    pieces += [(f"<0x{b:02X}>", -9.0) for b in range(256)]
    backend = Backend(models.Unigram(pieces, 0, True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(build(tokenizer_source, tmp_path))
    assert tokenizer.encode("the bad") == [2, 1, 4, 3, 6]
    assert tokenizer.decode([2, 1, 4, 3, 6]) == "the bad" == backend.decode([2, 1, 4, 3, 6])
    assert tokenizer.decode([1, 2]) == " the" == backend.decode([1, 2])
    assert tokenizer.longest_token_bytes == 6


def test_truncation_and_padding_are_dropped(folder: Path, tokenizer_source: Any) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    ids = build(tokenizer_source, folder).tokenizer.encode("the quick brown fox jumps over it").ids
    assert 4 < len(ids) < 64


def test_eos_ids_of_generation_config_and_config(folder: Path, tokenizer_source: Any) -> None:
    assert build(tokenizer_source, folder, eos_token_id=398).spec.eos_token_ids == [396, 398, 399]  # and the template's
    edit(folder / "generation_config.json", eos_token_id=[397, 396])
    assert build(tokenizer_source, folder, eos_token_id=398).spec.eos_token_ids == [396, 397]
    edit(folder / "generation_config.json", eos_token_id=4000)
    with pytest.raises(TokenizerBuildError, match="eos token id 4000 is not in the vocabulary"):
        build(tokenizer_source, folder)
    edit(folder / "generation_config.json", eos_token_id="x")
    with pytest.raises(TokenizerBuildError, match="eos_token_id is 'x'"):
        build(tokenizer_source, folder)


def test_bos_from_special_tokens_map_or_config(folder: Path, tokenizer_source: Any) -> None:
    (folder / "tokenizer_config.json").unlink()
    edit(folder / "special_tokens_map.json", bos_token={"content": "<|im_start|>"}, pad_token="<|pad|>")
    spec = build(tokenizer_source, folder, eos_token_id=396).spec
    assert (spec.bos_token_id, spec.pad_token_id, spec.eos_token_ids) == (398, 397, [396])


def test_added_tokens_of_tokenizer_config(folder: Path, tokenizer_source: Any, load: Any) -> None:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    edit(
        folder / "tokenizer_config.json",
        added_tokens_decoder={"400": {"content": "<think>", "special": False, **flags}},
    )
    tokenizer = load(build(tokenizer_source, folder))
    assert tokenizer.encode("<think>") == [400] and tokenizer.decode([400]) == "<think>"
    edit(folder / "tokenizer_config.json", added_tokens_decoder={"450": {"content": "<far>", "special": True, **flags}})
    with pytest.raises(TokenizerBuildError, match=r"'<far>' the id 450.*the id 400"):
        build(tokenizer_source, folder)


def test_other_tokens_around_a_text_are_kept(folder: Path, tokenizer_source: Any, load: Any) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|pad|> <|im_start|> $A <|eos|>",
        special_tokens=[("<|pad|>", 397), ("<|im_start|>", 398), ("<|eos|>", 396)],
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load(build(tokenizer_source, folder))
    assert tokenizer.encode("") == [397, 398, 396]
    assert not tokenizer.spec.add_bos and tokenizer.spec.add_eos


@pytest.mark.parametrize(
    ("value", "default", "named"),
    [
        ("T", "T", {}),
        ([{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}], "D", {"rag": "R"}),
        ({"default": "D", "tool_use": "U"}, "D", {"tool_use": "U"}),
        (None, None, {}),
    ],
)
def test_chat_templates_of_tokenizer_config(
    value: Any, default: Any, named: Any, folder: Path, tokenizer_source: Any
) -> None:
    edit(folder / "tokenizer_config.json", chat_template=value)
    built = build(tokenizer_source, folder)
    assert (built.chat_template, built.spec.chat_templates) == (default, named)


def test_chat_template_files_win(folder: Path, tokenizer_source: Any) -> None:
    (folder / "chat_template.jinja").write_text("FILE\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("RAG")
    built = build(tokenizer_source, folder)
    assert (built.chat_template, built.spec.chat_templates) == ("FILE\n", {"rag": "RAG"})


@pytest.mark.parametrize("value", [5, [{"name": "x"}], {"default": 5}])
def test_malformed_chat_template_is_refused(value: Any, folder: Path, tokenizer_source: Any) -> None:
    edit(folder / "tokenizer_config.json", chat_template=value)
    with pytest.raises(TokenizerBuildError, match="chat_template"):
        build(tokenizer_source, folder)


def test_folder_without_a_tokenizer(tmp_path: Path, tokenizer_source: Any) -> None:
    with pytest.raises(TokenizerBuildError, match=r"no tokenizer found; expected tokenizer\.json"):
        build(tokenizer_source, tmp_path)


def test_damaged_files(folder: Path, tokenizer_source: Any) -> None:
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (folder / name).write_text("{")
        with pytest.raises(TokenizerBuildError, match=name):
            build(tokenizer_source, folder)


def test_merge_of_an_unknown_token_is_refused(folder: Path, tokenizer_source: Any) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["merges"].append(["the", "\u0416"])
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerBuildError, match=r"tokenizer\.json: not a tokenizer that can be loaded"):
        build(tokenizer_source, folder)


@pytest.mark.parametrize(
    ("model", "decoder", "message"),
    [
        (models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"), decoders.WordPiece(), "model WordPiece"),
        (models.WordLevel({"a": 0}, unk_token="a"), None, "model WordLevel"),
        (models.BPE({"a": 0}, []), None, "decoder is None"),
        (models.BPE({"a": 0}, []), decoders.CTC(), "CTC"),
        (models.BPE({"a": 0}, [], dropout=0.5), decoders.ByteLevel(), "dropout is 0.5"),
    ],
)
def test_other_kinds_are_refused(model: Any, decoder: Any, message: str, tmp_path: Path, tokenizer_source: Any) -> None:
    backend = Backend(model)
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerBuildError, match=message):
        build(tokenizer_source, tmp_path)


@pytest.mark.parametrize(
    ("normalizer", "factor"),
    [
        (None, 1),
        (normalizers.NFC(), 4),
        (normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]), 9),
        (normalizers.Replace("abc", "x"), 3),
        (normalizers.Strip(), 0),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "")]), 0),
    ],
)
def test_longest_token_counts_what_a_normaliser_shortens(
    normalizer: Any, factor: int, folder: Path, tokenizer_source: Any
) -> None:
    longest = build(tokenizer_source, folder).spec.longest_token_bytes
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.save(str(folder / "tokenizer.json"))
    plain = max(len(token) for token in vocabulary)
    expected = max(plain * factor, len("<|im_start|>")) if factor else 0
    assert longest == max(plain, len("<|im_start|>"))
    assert build(tokenizer_source, folder).spec.longest_token_bytes == expected
