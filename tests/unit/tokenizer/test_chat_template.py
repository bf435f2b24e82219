"""Chat templates render as transformers renders them (tools/record_chat_templates.py), and fail with a reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from trivet.exporters.checkpoint import open_checkpoint
from trivet.exporters.tokenizer import build_tokenizer
from trivet.runtime.tokenizer import ChatTemplate, ChatTemplateError, MissingChatTemplateError, Tokenizer

USER = {"role": "user", "content": "hi"}
RECORDED_VARIABLES = {"enable_thinking"}


def render(template: ChatTemplate, case: dict[str, Any], special: dict[str, str]) -> str | None:
    """The text, or None where the template refuses."""
    variables = {key: value for key, value in case.items() if key in RECORDED_VARIABLES}
    options = {key: value for key, value in case.items() if key not in RECORDED_VARIABLES}
    try:
        return template.render(options.pop("messages"), **options, variables={**special, **variables})
    except ChatTemplateError:
        return None


def comparable(template: ChatTemplate, name: str, case: dict[str, Any]) -> bool:
    """transformers hands contents over as they come; we convert them, so only native ones can be compared."""
    return name != "parts" if template.content_format == "string" else True


@pytest.mark.parametrize("name", ["chatml", "features", "strict"])
def test_written_templates_render_as_transformers(name: str, templates: dict[str, Any]) -> None:
    recorded = templates["templates"][name]
    template = ChatTemplate(recorded["template"])
    assert template.content_format == "string"
    compared = 0
    for case, expected in recorded["text"].items():
        if comparable(template, case, templates["cases"][case]):
            assert render(template, templates["cases"][case], recorded["special"]) == expected, case
            compared += 1
    assert compared == len(templates["cases"]) - 1 == 15


def test_template_of_parts_renders_as_transformers(templates: dict[str, Any]) -> None:
    recorded = templates["templates"]["parts"]
    template = ChatTemplate(recorded["template"])
    assert template.content_format == "openai"
    assert render(template, templates["cases"]["parts"], {}) == recorded["text"]["parts"] == "user=<one><two>\n"[:-1]


def check_published(source: str | None, recorded: dict[str, Any], templates: dict[str, Any]) -> None:
    assert source is not None
    assert hashlib.sha256(source.encode()).hexdigest() == recorded["template_sha256"]
    template = ChatTemplate(source)
    for name, expected in recorded["text_sha256"].items():
        case = templates["cases"][name]
        if comparable(template, name, case):
            text = render(template, case, recorded["special"])
            assert (text and hashlib.sha256(text.encode()).hexdigest()) == expected, name


def test_smollm2_renders_as_transformers(smollm2: Tokenizer, templates: dict[str, Any]) -> None:
    check_published(smollm2.chat_template, templates["published"]["smollm2-135m"], templates)


@pytest.mark.real_models
def test_qwen_gguf_renders_as_transformers(
    real_model: Callable[[str], Path], templates: dict[str, Any], tokenizer_source: Any
) -> None:
    metadata = dict(open_checkpoint(real_model("qwen2.5-coder-0.5b")).metadata)
    built = build_tokenizer(tokenizer_source(metadata=metadata))
    check_published(built.chat_template, templates["published"]["qwen2.5-coder-0.5b"], templates)


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "gemma3", "deepseek-v3"])
def test_folder_renders_as_transformers(
    name: str, real_model: Callable[[str], Path], templates: dict[str, Any], tokenizer_source: Any
) -> None:
    built = build_tokenizer(tokenizer_source(kind="safetensors", directory=real_model(f"tok-{name}")))
    check_published(built.chat_template, templates["published"][name], templates)


def test_chat_of_a_tokenizer(smollm2: Tokenizer) -> None:
    text = smollm2.apply_chat_template([USER])
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.apply_chat_template([USER], add_generation_prompt=False).endswith("hi<|im_end|>\n")
    final = [USER, {"role": "assistant", "content": "I am"}]
    text = smollm2.apply_chat_template(final, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nI am")
    assert (
        smollm2.apply_chat_template([USER], chat_template="{{ bos_token }}{{ x }}{{ eos_token }}", x=1)
        == "<|im_start|>1<|im_end|>"
    )


def test_named_templates(tokenizer_source: Any, bpe: Any, load: Any) -> None:
    keys = {
        "tokenizer.chat_template": "default",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.rag": "rag",
    }
    tokenizer = load(build_tokenizer(tokenizer_source(metadata={**bpe(), **keys})))
    assert tokenizer.apply_chat_template([USER]) == "default"
    assert tokenizer.apply_chat_template([USER], tools=[{"type": "function"}]) == "tools"
    assert tokenizer.apply_chat_template([USER], chat_template="rag") == "rag"


def test_missing_template_says_what_to_do(tiny_bpe: Tokenizer, tokenizer_source: Any, bpe: Any, load: Any) -> None:
    with pytest.raises(MissingChatTemplateError, match=r"no chat template.*completions.*--chat-template"):
        tiny_bpe.apply_chat_template([USER])
    only_named = load(build_tokenizer(tokenizer_source(metadata={**bpe(), "tokenizer.chat_template.rag": "rag"})))
    with pytest.raises(MissingChatTemplateError, match=r"named ones \(rag\)"):
        only_named.apply_chat_template([USER])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only one system message') }}", "refused the conversation: only one system message"),
        ("{{ messages[5].role }}", "has no element 5"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|not callable|unsafe"),
        ("{% set ns = namespace(_x=1) %}", "underscore"),
        ("{{ 'x' * 999999999 }}", "repeated to more than"),
        ("{{ 9 ** 999999999 }}", r"\*\*"),
        ("{% for i in range(9999999999) %}x{% endfor %}", "[Rr]ange too big"),
        ("{% for i in range(90000) %}{{ 'x' * 100000 }}{% endfor %}", "wrote more than 67108864 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_failing_templates_give_their_reason(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source).render([USER])


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(ChatTemplateError, match="line 2: "):
        ChatTemplate("\n{% for x in %}")


def test_strftime_now() -> None:
    years = {str(datetime.now().year)}
    text = ChatTemplate("{{ strftime_now('%Y') }}").render([USER])
    assert text in years | {str(datetime.now().year)}


def test_generation_tag_and_loop_controls() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% break %}{% endfor %}"
    assert ChatTemplate(source).render([USER, USER]) == "[hi]"


def test_reserved_variables_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="must not be named messages"):
        ChatTemplate("x").render([USER], variables={"messages": []})


def test_continue_and_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        ChatTemplate("{{ messages[0].content }}").render([USER], continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        ("{{ messages[0].content }}", [], "needs a last message"),
        ("{{ messages[0].content }}", [{"role": "assistant"}], "needs a last message"),
        ("{{ messages[0].role }}", [USER], "never reads `content`"),
        ("{{ messages[0].content | upper }}", [USER], "alters or leaves out"),
    ],
)
def test_continue_final_message_that_cannot_be(source: str, messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source).render(messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("trim", ["", " | trim"])
def test_continue_final_message_cuts_after_its_text(trim: str) -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.content" + trim + " }}>{% endfor %}")
    final = [USER, {"role": "assistant", "content": "so, "}]
    text = template.render(final, add_generation_prompt=False, continue_final_message=True)
    assert text == ("<hi><so," if trim else "<hi><so, ")


# --- content format ---
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}", "string"),
        ("{{ messages[0].content }}", "string"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for p in m['content'] | list %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages[1:] %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t.content }}{% endfor %}{% endfor %}", "string"),
        ("{% for d in documents %}{% for p in d.content %}{% endfor %}{% endfor %}", "string"),
        ("nothing", "string"),
    ],
)
def test_content_format_is_read_from_the_template(source: str, expected: str) -> None:
    assert ChatTemplate(source).content_format == expected


def test_contents_are_converted_to_the_format() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]}]
    as_json = ChatTemplate("{{ messages | tojson }}")
    assert json.loads(as_json.render(parts)) == [{"role": "user", "content": "a\nb\nc"}]
    openai = [{"role": "user", "content": [{"type": "text", "text": t} for t in "abc"]}]
    assert json.loads(as_json.render(parts, content_format="openai")) == openai
    assert json.loads(as_json.render([USER], content_format="openai")) == [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    ]
    assert parts[0]["content"][1] == "b"  # the caller's messages stay as they are


def test_reasoning_under_every_name() -> None:
    as_json = ChatTemplate("{{ messages | tojson }}")
    for name in ("reasoning", "thinking", "reasoning_content"):
        (message,) = json.loads(
            as_json.render([{"role": "assistant", "content": "x", name: "why", "tool_calls": None}])
        )
        assert message["thinking"] == message["reasoning_content"] == "why"
        assert "tool_calls" not in message  # a key that is None is left out


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (["hi"], r"messages\[0\] is a str"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is a int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is a part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] is a part of type 'text'"),
        ([{"role": "user", "content": [3]}], r"content\[0\] is a int"),
        ([{"role": "user", "content": object()}], "holds a object"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate("{{ messages[0].content }}").render(messages)
