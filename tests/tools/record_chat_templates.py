"""Record what transformers renders from chat templates, into tests/data/chat_templates.json.

Run in the oracle environment, with the model cache filled: python tests/tools/record_chat_templates.py
Templates written for this file are stored with their full output. Of published templates (some without a clear licence)
only the SHA-256 of the output is stored; the tests read those templates from the model cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).parents[1] / "data" / "chat_templates.json"
MODELS = Path(os.environ.get("TRIVET_TEST_MODELS", Path.home() / ".cache/trivet-tests/models"))

GGUF_FILES = {
    "smollm2-135m": "smollm2-135m-instruct-q4_1.gguf",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}
FOLDERS = ("qwen3", "llama3.1", "gemma3", "deepseek-v3")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place <now> & 'later'",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Stadt, z. B. Köln"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
USER = {"role": "user", "content": 'Hi, how\'s <b>it</b> & "you"? 你好 🏳️‍🌈'}
ASSISTANT = {"role": "assistant", "content": "  Fine.\n\nAnd you? "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "c1", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}}
    ],
}
STRING_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "id": "c1", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
    ],
}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "c1", "content": '{"sky": "blue"}'}

# name -> arguments of apply_chat_template
CASES: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "system": {"messages": [{"role": "system", "content": "Be brief.\n"}, USER]},
    "multi-turn": {
        "messages": [{"role": "system", "content": "S"}, USER, ASSISTANT, {"role": "user", "content": " x "}]
    },
    "tools": {"messages": [{"role": "system", "content": "S"}, USER], "tools": [WEATHER]},
    "tool call": {"messages": [USER, CALL, RESULT], "tools": [WEATHER, WEATHER]},
    "string tool call": {"messages": [USER, STRING_CALL, RESULT]},
    "two results": {"messages": [USER, CALL, RESULT, RESULT, ASSISTANT, USER]},
    "continue": {"messages": [USER, ASSISTANT], "add_generation_prompt": False, "continue_final_message": True},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    },
    "reasoning": {"messages": [USER, {**ASSISTANT, "reasoning_content": "Let me see."}, USER, ASSISTANT]},
    "no thinking": {"messages": [USER], "enable_thinking": False},
    "think in content": {"messages": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}, USER]},
    "empty content": {"messages": [{"role": "user", "content": ""}]},
    "two users": {"messages": [USER, USER]},
    "documents": {"messages": [USER], "documents": [{"title": "T & T", "text": "é"}]},
}

# Written for these tests; each uses some of what published templates use.
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}\n"
        "    {{- '<|im_start|>' + m.role + '\\n' + m['content'] | default('') + '<|im_end|>\\n' }}\n"
        "{% endfor %}\n    {% if add_generation_prompt %}\n{{ '<|im_start|>assistant\\n' }}\n{% endif %}\n"
    ),
    "features": (
        "{{ bos_token }}{%- set ns = namespace(n=0, seen=false) %}\n"
        "{%- macro show(x, indent=none) %}{{ x | tojson(indent=indent) }}{% endmacro %}\n"
        "{%- if tools is not none and tools %}Tools: {% for t in tools %}{{ show(t.function, 2) }}|{{ t | tojson }}"
        "{{ t.function.parameters | tojson(sort_keys=true, separators=(',', ':')) }}{% endfor %}\n{%- endif %}\n"
        "{%- if documents %}{% for d in documents %}[{{ d.title }}: "
        "{{ d | tojson(ensure_ascii=true) }}]{% endfor %}{% endif %}\n"
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'tool' %}{% continue %}{% endif %}\n"
        "    {%- set ns.n = ns.n + 1 %}\n"
        "    {%- if ns.n > 3 %}{% break %}{% endif %}\n"
        "    {{- loop.index0 ~ ':' ~ message['role'] }}\n"
        "    {%- generation %}{{ (message.content or '') | trim | upper }}{% endgeneration %}\n"
        "    {%- for call in message.tool_calls or [] %}{{ dict(call.function).items() | list }}{% endfor %}\n"
        "    {{- message.reasoning_content | default('-') }}{{ message.get('name') }}\n"
        "    {{- '; ' if not loop.last else eos_token }}\n"
        "{%- endfor %}\n"
        "{{ messages[-1].content.split(' ')[-1] if messages[-1].content is string }}{{ add_generation_prompt }}"
    ),
    "parts": (
        "{% for message in messages %}{{ message.role }}={% for part in message['content'] %}"
        "{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}\n{% endfor %}"
    ),
    "strict": (
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate user/assistant, got ' + message.role) }}{% endif %}"
        "[{{ message.content }}]{% endfor %}"
    ),
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str, special: dict[str, str], case: dict[str, Any]) -> str | None:
    """What transformers renders; None where it, or the template, refuses."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), **special)
    arguments = {"add_generation_prompt": True, **case}
    messages = arguments.pop("messages")
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)
    except Exception as error:
        print(f"  refused: {type(error).__name__}: {str(error)[:100]}")
        return None
    return str(text)


def published() -> dict[str, tuple[str, dict[str, str]]]:
    """name -> (template, special tokens) from the model cache."""
    found = {}
    for name, file in GGUF_FILES.items():
        fields = gguf.GGUFReader(MODELS / file).fields
        tokens = fields["tokenizer.ggml.tokens"]
        special = {
            f"{key}_token": tokens.contents(fields[f"tokenizer.ggml.{key}_token_id"].contents())
            for key in ("bos", "eos")
        }
        found[name] = (fields["tokenizer.chat_template"].contents(), special)
    for name in FOLDERS:
        config = json.loads((MODELS / "tokenizers" / name / "tokenizer_config.json").read_text())
        special = {}
        for key in ("bos_token", "eos_token"):
            token = config.get(key)
            token = token["content"] if isinstance(token, dict) else token
            special |= {key: token} if token else {}
        found[name] = (config["chat_template"], special)
    return found


def record(template: str, special: dict[str, str], *, full: bool) -> dict[str, str | None]:
    recorded: dict[str, str | None] = {}
    for name, case in CASES.items():
        text = render(template, special, case)
        recorded[name] = text if full or text is None else hashlib.sha256(text.encode()).hexdigest()
    return recorded


def main() -> None:
    data: dict[str, Any] = {"cases": CASES, "templates": {}, "published": {}}
    for name, template in TEMPLATES.items():
        print(name)
        data["templates"][name] = {
            "template": template,
            "special": SPECIAL,
            "text": record(template, SPECIAL, full=True),
        }
    for name, (template, special) in published().items():
        print(name)
        digest = hashlib.sha256(template.encode()).hexdigest()
        data["published"][name] = {
            "template_sha256": digest,
            "special": special,
            "text_sha256": record(template, special, full=False),
        }
    OUT.write_text(json.dumps(data, indent=1, ensure_ascii=True) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
