"""What the names in `tokenizer.ggml.pre` mean: the regexes that cut text into words before byte-level BPE.

A name stands for the pre-tokenizer of one published tokenizer.json; the patterns below are those files' own (facts from
the tokenizer files and from llama.cpp's table of names). Where llama.cpp approximates a pattern because its regex
engine lacks a class, the model's own pattern is the one here. Text normalisation is not part of a name and GGUF has no
key for it on byte-level vocabularies, so none is applied, as in llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from .errors import UnknownPreTokenizerError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` are applied one after the other, each inside the pieces that the one before left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token as a whole is never split
    add_bos: bool = False  # default where tokenizer.ggml.add_bos_token is absent

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object: the splits, then the byte-level alphabet."""
        splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_UP_TO_3_DIGITS = r"\p{N}{1,3}"


def _cl100k(digits: str, spaces: str = _SPACES) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{spaces}"


def _o200k(suffix: str, digits: str) -> str:
    """Words cut where lower case meets upper case; `suffix` is what may follow a word."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}[{upper}]*[{lower}]+{suffix}|{lead}[{upper}]+[{lower}]*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


# Cased letters, as DeepSeek-LLM's tokenizer.json lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_DEEPSEEK_V3 = (
    _UP_TO_3_DIGITS,
    _CJK,
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SPACES_BY_POWER = r"\s*[\r\n]+|" + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = _cl100k(_UP_TO_3_DIGITS, _SPACES_BY_POWER + r"\s{1,2}(?!\S)|\s{1}")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

_FAMILIES: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert",
    ),
    (PreTokenizer((_DIGIT, _GPT2)), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (
        PreTokenizer((_cl100k(_DIGIT),)),
        "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo f2llmv2",
    ),
    (PreTokenizer((_QWEN35,)), "qwen35"),
    (
        PreTokenizer((_cl100k(_UP_TO_3_DIGITS),), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (PreTokenizer((_cl100k(_UP_TO_3_DIGITS),)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_cl100k(_UP_TO_3_DIGITS),), ignore_merges=True), "glm4 glm5"),
    (PreTokenizer((_UP_TO_3_DIGITS, _cl100k(r"\p{N}+")), ignore_merges=True), "minicpm5"),
    (PreTokenizer((_o200k("", _DIGIT),), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer((_o200k(f"{_CONTRACTION}?", _UP_TO_3_DIGITS),)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _CJK_KOREAN,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_KOREAN, _DIGIT)), "deepseek-coder"),
    (PreTokenizer(_DEEPSEEK_V3), "deepseek-v3 hunyuan-dense joyai-llm"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_BLOOM, _DIGIT)), "viking"),
    (PreTokenizer((_JAIS2,)), "jais-2"),
    (PreTokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer((_SEED_CODER,)), "seed-coder"),
    # What llama.cpp does where a file says "default": no model's own pattern, but the same ids.
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for pre, names in _FAMILIES for name in names.split()}


def pre_tokenizer(name: str | None, override: str | None) -> PreTokenizer:
    """The pre-tokenizer for `override` if given, else for `name` (the value of tokenizer.ggml.pre, None = absent).

    Raises UnknownPreTokenizerError, naming the key (or the flag), the value and the names that are known.
    """
    chosen = name if override is None else override
    if chosen is not None and chosen in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[chosen]
    known = ", ".join(sorted(PRE_TOKENIZERS))
    if override is not None:
        raise UnknownPreTokenizerError(f"--tokenizer-pre {override!r} is not a known pre-tokenizer; known: {known}")
    came = "is missing" if name is None else f"is {name!r}, which this trivet does not know"
    raise UnknownPreTokenizerError(
        f"tokenizer.ggml.pre {came}; known: {known}. If you know which one the model was trained with, "
        "say so with --tokenizer-pre NAME"
    )
