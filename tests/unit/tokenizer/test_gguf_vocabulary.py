"""GGUF vocabularies: what is honoured, and what is refused by key and value."""

from __future__ import annotations

import random
from typing import Any

import pytest
from trivet.exporters.tokenizer import TokenizerBuildError, UnknownPreTokenizerError, build_tokenizer
from trivet.exporters.tokenizer.scores import merges_from_scores


def build(source: Any, metadata: dict[str, Any], pre: str | None = None) -> Any:
    return build_tokenizer(source(metadata=metadata), pre_override=pre)


def test_facts_of_a_byte_level_vocabulary(tokenizer_source: Any, bpe: Any, load: Any) -> None:
    built = build(tokenizer_source, bpe(padding_token_id=397))
    spec = built.spec
    assert (spec.bos_token_id, spec.eos_token_ids, spec.pad_token_id) == (395, [396], 397)
    assert (spec.bos_token, spec.eos_token, spec.add_bos, spec.add_eos) == ("<|bos|>", "<|eos|>", False, False)
    assert built.chat_template is None
    tokenizer = load(built)
    assert tokenizer.encode("<|bos|>the <|im_end|>")[0] == 395
    assert tokenizer.encode("<|bos|>the <|im_end|>")[-1] == 399
    assert tokenizer.decode(tokenizer.encode("the 12 naïve 🙂")) == "the 12 naïve 🙂"


@pytest.mark.parametrize(
    ("bos", "eos", "ids"), [(True, False, [395]), (False, True, [396]), (True, True, [395, 396]), (False, False, [])]
)
def test_add_bos_and_eos_are_honoured(
    bos: bool, eos: bool, ids: list[int], tokenizer_source: Any, bpe: Any, load: Any
) -> None:
    tokenizer = load(build(tokenizer_source, bpe(add_bos_token=bos, add_eos_token=eos)))
    assert (tokenizer.spec.add_bos, tokenizer.spec.add_eos) == (bos, eos)
    assert tokenizer.encode("") == ids
    assert tokenizer.encode("", add_special_tokens=False) == []
    inner = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [*([395] if bos else []), *inner, *([396] if eos else [])]


def test_llama_bpe_adds_bos_and_keeps_whole_words(tokenizer_source: Any, bpe: Any, load: Any) -> None:
    metadata = bpe(pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"][300] = "qzx"  # a token that no merge reaches
    metadata["tokenizer.ggml.merges"] = [m for m in metadata["tokenizer.ggml.merges"] if usable(m, metadata)]
    tokenizer = load(build(tokenizer_source, metadata))
    assert tokenizer.spec.add_bos
    assert tokenizer.encode("qzx") == [395, 300]
    smollm = load(build(tokenizer_source, {**metadata, "tokenizer.ggml.pre": "smollm"}))
    assert len(smollm.encode("qzx")) == 3


def usable(merge: str, metadata: dict[str, Any]) -> bool:
    left, right = merge.split(" ")
    tokens = set(metadata["tokenizer.ggml.tokens"])
    return {left, right, left + right} <= tokens


def test_space_prefix_of_a_scored_vocabulary(tokenizer_source: Any, spm: Any, load: Any) -> None:
    always = load(build(tokenizer_source, spm()))
    never = load(build(tokenizer_source, spm(add_space_prefix=False)))
    the = always.token_to_id("\u2581the")
    assert always.encode("the") == [1, the]
    assert never.encode(" the") == [1, the]
    assert never.encode("the") != [1, the]
    # The prefix comes again after a special token, as in llama.cpp.
    assert always.encode("</s>the") == [1, 2, the]
    assert always.decode([1, the]) == "the" and never.decode([1, the]) == " the"


def test_token_types_of_a_scored_vocabulary(tokenizer_source: Any, spm: Any, load: Any) -> None:
    metadata = spm(add_space_prefix=False, add_bos_token=False)
    for i, (token, kind) in {300: ("<tool>", 4), 301: ("\n\n", 4), 302: ("<ctl>", 3)}.items():
        metadata["tokenizer.ggml.tokens"][i] = token
        metadata["tokenizer.ggml.token_type"][i] = kind
    tokenizer = load(build(tokenizer_source, metadata))
    byte = tokenizer.token_to_id("<0x0A>")
    assert tokenizer.encode("\n<tool>\n\n<ctl>") == [byte, 300, 301, 302]
    assert tokenizer.decode([byte, 300, 301, 302]) == "\n<tool>\n\n"
    assert tokenizer.decode([byte, 300, 301, 302], skip_special_tokens=False) == "\n<tool>\n\n<ctl>"
    assert tokenizer.encode("é") == [tokenizer.token_to_id("<0xC3>"), tokenizer.token_to_id("<0xA9>")]


def test_merges_reproduce_segmentation_by_score() -> None:
    """Against the definition: join the best-scored pair, leftmost first, until none is left."""
    generator = random.Random(3)
    letters = "abc"
    pieces = [(c, 0.0) for c in letters]
    pieces += [
        (p, -float(i))
        for i, p in enumerate(
            sorted({"".join(generator.choices(letters, k=n)) for n in (2, 2, 3, 3, 4, 5) for _ in range(9)})
        )
    ]
    pieces = list(dict(pieces).items())
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges_from_scores(pieces))))}
    scores = dict(pieces)
    for _ in range(500):
        text = "".join(generator.choices(letters, k=generator.randint(1, 14)))
        by_score = join(list(text), lambda a, b: -scores[a + b] if len(a + b) > 1 and a + b in scores else None)
        by_rank = join(list(text), lambda a, b: ranks.get((a, b)))
        assert by_rank == by_score, text


def join(parts: list[str], cost: Any) -> list[str]:
    while True:
        costs = [(c, i) for i in range(len(parts) - 1) if (c := cost(parts[i], parts[i + 1])) is not None]
        if not costs:
            return parts
        _, at = min(costs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_eos_ids_come_from_eos_eot_eom_keys(tokenizer_source: Any, bpe: Any) -> None:
    assert build(tokenizer_source, bpe(eot_token_id=399, eom_token_id=398)).spec.eos_token_ids == [396, 399, 398]


def test_end_of_turn_token_counts_only_if_control_and_in_the_template(tokenizer_source: Any, bpe: Any) -> None:
    with_template = {**bpe(), "tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>"}
    assert build(tokenizer_source, with_template).spec.eos_token_ids == [396, 399]
    assert build(tokenizer_source, bpe()).spec.eos_token_ids == [396]
    other = {**bpe(), "tokenizer.chat_template": "{{ messages[0].content }}<|eos|>"}
    assert build(tokenizer_source, other).spec.eos_token_ids == [396]
    with_template["tokenizer.ggml.token_type"] = [4] * 400
    assert build(tokenizer_source, with_template).spec.eos_token_ids == [396]


def test_named_chat_templates(tokenizer_source: Any, bpe: Any) -> None:
    metadata = {**bpe(), "tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    built = build(tokenizer_source, {**metadata, "tokenizer.chat_templates": ["tool_use"]})
    assert built.chat_template == "D" and built.spec.chat_templates == {"tool_use": "T"}


def test_unknown_pre_names_key_value_known_names_and_flag(tokenizer_source: Any, bpe: Any) -> None:
    with pytest.raises(UnknownPreTokenizerError) as error:
        build(tokenizer_source, bpe(pre="brand-new"))
    for part in ("tokenizer.ggml.pre", "'brand-new'", "llama-bpe", "qwen2", "--tokenizer-pre NAME"):
        assert part in str(error.value)
    with pytest.raises(UnknownPreTokenizerError, match=r"tokenizer\.ggml\.pre is missing"):
        build(tokenizer_source, bpe(pre=None))
    with pytest.raises(UnknownPreTokenizerError, match="--tokenizer-pre 'x'"):
        build(tokenizer_source, bpe(), pre="x")


def test_pre_override_replaces_the_key(tokenizer_source: Any, bpe: Any) -> None:
    assert build(tokenizer_source, bpe(pre="brand-new"), pre="llama-bpe").spec.add_bos
    assert not build(tokenizer_source, bpe(pre="llama-bpe"), pre="smollm").spec.add_bos


def test_pre_override_is_refused_where_it_means_nothing(tokenizer_source: Any, spm: Any, tmp_path: Any) -> None:
    with pytest.raises(TokenizerBuildError, match="--tokenizer-pre smollm"):
        build(tokenizer_source, spm(), pre="smollm")
    with pytest.raises(TokenizerBuildError, match="--tokenizer-pre smollm"):
        build_tokenizer(tokenizer_source(kind="safetensors", directory=tmp_path), pre_override="smollm")


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "gemma4", "brand-new", None])
def test_other_tokenizer_models_are_refused_by_name(model: str | None, tokenizer_source: Any, bpe: Any) -> None:
    with pytest.raises(TokenizerBuildError, match=r"tokenizer\.ggml\.model") as error:
        build(tokenizer_source, bpe(model=model))
    assert (repr(model) if model else "missing") in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens holds a str"),
        ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokens": ["a", "b", "a"]}, "ids 0 and 2 are both 'a'"),
        ({"token_type": [1, 1]}, "token_type has 2 entries, but tokenizer.ggml.tokens has 400"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["q \u0416"]}, r"merges\[0\] is .q \u0416.: expected two tokens"),
        ({"merges": ["th"]}, r"merges\[0\] is 'th'"),
        ({"bos_token_id": 400}, "bos_token_id is 400; the vocabulary has 400 tokens"),
        ({"eot_token_id": 4000}, "eot_token_id is 4000"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token"),
    ],
)
def test_damaged_vocabularies_are_refused(changes: Any, message: str, tokenizer_source: Any, bpe: Any) -> None:
    with pytest.raises(TokenizerBuildError, match=message):
        build(tokenizer_source, bpe(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"unknown_token_id": 400}, "unknown_token_id is 400"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    ],
)
def test_damaged_scored_vocabularies_are_refused(changes: Any, message: str, tokenizer_source: Any, spm: Any) -> None:
    with pytest.raises(TokenizerBuildError, match=message):
        build(tokenizer_source, spm(**changes))
