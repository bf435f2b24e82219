"""Record what transformers, llama.cpp and sentencepiece make of the probe texts, into tests/data/tokenizer_probes.json.

Run in the oracle environment, with the model cache filled: python tests/tools/record_tokenizer_probes.py
Needs transformers, llama-cpp-python, gguf and sentencepiece; the tests need only the file.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import sentencepiece
from probe_vocabulary import probe_vocabulary
from transformers import AutoTokenizer, PreTrainedTokenizerFast

OUT = Path(__file__).parents[1] / "data" / "tokenizer_probes.json"
MODELS = Path(os.environ.get("TRIVET_TEST_MODELS", Path.home() / ".cache/trivet-tests/models"))

PROBES = [
    "",
    " ",
    "  ",
    "hello",
    " hello",
    "   hello   world  ",
    "Hello, World! It's 2026-11-29; I'll pay $1,234.56 (or 7%).",
    "0 1 12 123 1234 12345 123456789 3.14159 ½ ²³ ٣٤٥ 一二三",
    "a  12   b\t\tc \n d",
    "\n",
    "\n\n",
    "line one\n\n\nline two\r\n\r\n  indented\n\t\ttabs   \n   ",
    "ɪntəˈnæʃənəl fəˈnɛtɪk ˈælfəˌbɛt t͡ʃ ɔ̃",
    "naïve café — “quoted” … ‘single’ ÅÄÖ ßẞ ﬁ",
    "e\u0301 o\u0308 n\u0303 (decomposed)",
    "🏳️‍🌈 👩‍👩‍👧‍👦 👍🏽 🇩🇪 😀😃 ❤️ 🫠",
    "\u200b\u200d\ufeff\u00a0\u3000|\u2028|",
    "你好，世界！こんにちは世界。안녕하세요 세계 𠮷野家",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם",
    "Привет, мир! Γειά σου Κόσμε हिन्दी में नमस्ते ภาษาไทย",
    "def f(x: int) -> str:\n    return f\"{x!r}\" if x != 0 else '<none>'  # comment\n",
    '#include <stdio.h>\nint main(void) {\n\tprintf("%d\\n", 1<<3);\n}\n',
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\u00e9"}}',
    "don't DON'T we'Re I'D y'all o'clock 'tis rock'n'roll",
    "camelCase PascalCase HTTPServer snake_case kebab-case XMLHttpRequest2 ÉcoleÉtat",
    "https://example.org/a?b=c&d=%20#frag user@example.com ~/path/../x",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa -------------------- ====== ______ ......",
    "                                                  x",
    "!!!???***&&&^^^%%%$$$###@@@ +-*/= <=> |`~\\",
    "\u0001\u001f\u007f\u0085 control",
    "▁▁low▁line ▁ <0x0A> <0xFF>",
    "mixed  spaces   after.  Sentence  ends .   ",
    "end.\n/ and (x)\n#y,\n\n/* */ .\r\n//  ::\n1,\n2",
    "1 12 123 1234 12345 1234567 20261129 3.14159 a1b22c333d4444 ١٢٣٤ 1\u00b2",
    "Supercalifragilisticexpialidocious antidisestablishmentarianism",
]

# Texts with special tokens, of one tokenizer each.
SPECIAL_PROBES = {
    "smollm2": [
        "<|im_start|>user\nhi<|im_end|>\n", "a<|im_end|> b <repo_name><|endoftext|>", "<|im_start|",
        "x<|im_end|>1 2"],
    "gemma-3-270m": ["<bos>a<start_of_turn>user\nhi<end_of_turn>\n", "<b>bold</b> <table>\n\n\n</table>", " <eos> x"],
    "qwen2.5-coder-0.5b": ["<|im_start|>user\nhi<|im_end|>\n<tool_call>\n{}</tool_call>",
        "<|fim_prefix|>a<|fim_suffix|>b"],
    "qwen3": ["<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>", "<|endoftext|>"],
    "llama3.1": ["<|begin_of_text|>x<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"],
    "llama2": ["<s>[INST] hi [/INST] ok </s>", "</s> x", "a<s> b"],
    "gemma3": ["<bos>a<start_of_turn>user\nhi<end_of_turn>\n", "<b>bold</b> <table>\n\n\n</table>"],
    "deepseek-v3": ["<｜begin▁of▁sentence｜>a<｜User｜>b<｜Assistant｜>", "<|EOT|> x"],
    "gpt-oss": ["<|start|>user<|message|>hi<|end|><|return|>"],
}  # fmt: skip

GGUF_FILES = {
    "smollm2": "smollm2-135m-instruct-q4_1.gguf",
    "gemma-3-270m": "gemma-3-270m-q4_k_m.gguf",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}
PRE_NAMES = (
    "default gpt-2 smollm qwen2 qwen35 llama-bpe dbrx glm4 minicpm5 tekken gpt-4o deepseek-llm deepseek-coder "
    "deepseek-v3 falcon bloom viking jais-2 bailingmoe seed-coder"
).split()


class LlamaVocab:
    """A GGUF vocabulary in llama.cpp."""

    def __init__(self, path: Path) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str, add_special: bool) -> list[int]:
        data = text.encode()
        buffer = (llama_cpp.llama_token * (len(data) + 16))()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), add_special, True)
        assert count >= 0
        return list(buffer[:count])


def gguf_fields(path: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}


def write_vocabulary(path: Path, source: dict[str, Any], pre: str) -> None:
    """A vocabulary-only GGUF with the tokens and merges of `source` and another pre-tokenizer name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(source["tokens"])
    writer.add_token_types(source["token_type"])
    writer.add_token_merges(source["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def record_gguf() -> dict[str, Any]:
    recorded = {}
    for name, file in GGUF_FILES.items():
        vocab = LlamaVocab(MODELS / file)
        texts = PROBES + SPECIAL_PROBES[name]
        recorded[name] = {"file": file, "ids": [vocab.encode(text, True) for text in texts]}
    return recorded


def record_pre_names() -> dict[str, Any]:
    source = probe_vocabulary(gguf_fields(MODELS / GGUF_FILES["smollm2"]))
    recorded = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PRE_NAMES:
            path = Path(folder) / f"{name}.gguf"
            write_vocabulary(path, source, name)
            vocab = LlamaVocab(path)
            recorded[name] = [vocab.encode(text, False) for text in PROBES]
    return recorded


def record_transformers() -> dict[str, Any]:
    recorded = {}
    for folder in sorted((MODELS / "tokenizers").iterdir()):
        if (folder / "tokenizer.json").is_file():
            # For Llama 2, transformers 5 rebuilds the pre-tokenizer and so departs from the folder's tokenizer.json
            # (and from SentencePiece) at leading spaces; the generic class takes the file as it is.
            loader = PreTrainedTokenizerFast if folder.name == "llama2" else AutoTokenizer
            tokenizer = loader.from_pretrained(folder)
            texts = PROBES + SPECIAL_PROBES[folder.name]
            recorded[folder.name] = {
                "class": type(tokenizer).__name__,
                "ids": [tokenizer.encode(text) for text in texts],
            }
    return recorded


def record_sentencepiece() -> dict[str, Any]:
    recorded = {}
    for path in sorted((MODELS / "tokenizers" / "mistral").glob("*.model.v*")):
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        recorded[path.name] = [processor.encode(text) for text in PROBES]
    return recorded


def main() -> None:
    data = {
        "probes": PROBES,
        "special_probes": SPECIAL_PROBES,
        "llama_cpp": record_gguf(),
        "llama_cpp_pre": record_pre_names(),
        "transformers": record_transformers(),
        "sentencepiece": record_sentencepiece(),
    }
    # One vector of ids per line: short, and a change shows as one line.
    OUT.write_text(dump(data) + "\n", encoding="ascii")


def dump(value: Any, depth: int = 0) -> str:
    if isinstance(value, dict):
        items = (f"{json.dumps(k)}: {dump(v, depth + 1)}" for k, v in value.items())
        return "{\n" + ",\n".join(" " * (depth + 1) + item for item in items) + "\n" + " " * depth + "}"
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return (
            "[\n"
            + ",\n".join(" " * (depth + 1) + json.dumps(v, separators=(",", ":")) for v in value)
            + "\n"
            + " " * depth
            + "]"
        )
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    main()
