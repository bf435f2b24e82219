"""Whether a chat template wants message contents as text or as OpenAI's list of parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jinja2 import nodes

from .errors import ChatTemplateError


def detect_content_format(template: nodes.Template) -> Literal["string", "openai"]:
    """ "openai" if the template loops over a message's `content`, else "string".

    The template is followed from the variable `messages`: names assigned from it (`{% set m = messages[1:] %}`), loop
    variables over those, and names assigned from a message's content.
    """
    lists = _aliases(template, {"messages"})
    messages = {
        loop.target.name
        for loop in template.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _root(loop.iter) in lists
    }
    contents = {name for name, value in _assignments(template) if _is_content(value, messages)}
    for loop in template.find_all(nodes.For):
        iterated = _unwrap(loop.iter)
        if _is_content(iterated, messages) or (isinstance(iterated, nodes.Name) and iterated.name in contents):
            return "openai"
    return "string"


def _assignments(template: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node


def _aliases(template: nodes.Template, names: set[str]) -> set[str]:
    """`names` and every name assigned from one of them, at any number of removes."""
    while True:
        more = {name for name, value in _assignments(template) if _root(value) in names} - names
        if not more:
            return names
        names = names | more


def _unwrap(node: nodes.Node) -> nodes.Node:
    """The expression under filters, tests and slices."""
    while True:
        match node:
            case nodes.Getitem(arg=nodes.Slice(), node=inner):
                node = inner
            case nodes.Filter(node=nodes.Expr() as inner) | nodes.Test(node=inner):
                node = inner
            case _:
                return node


def _root(node: nodes.Node) -> str | None:
    """The variable that an expression is, or is a slice or filtering of."""
    node = _unwrap(node)
    return node.name if isinstance(node, nodes.Name) else None


def _is_content(node: nodes.Node, messages: set[str]) -> bool:
    """Whether `node` reads `.content` or `["content"]` of a message."""
    node = _unwrap(node)
    if isinstance(node, nodes.Getattr):
        key: Any = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return False
    return key == "content" and _root(node.node) in messages


def to_content_format(
    messages: Sequence[Mapping[str, Any]], wanted: Literal["string", "openai"]
) -> list[dict[str, Any]]:
    """Messages, copied, with contents in the wanted form; keys whose value is None are left out.

    Parts become text joined by newlines; text becomes one text part. Raises ChatTemplateError for a message or part of
    the wrong shape, or one that has no text form.
    """
    from .chat_template import _plain

    converted: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"messages[{index}] is a {type(message).__name__}, expected an object with a role")
        plain = {key: value for key, value in _plain(message).items() if value is not None}
        content = plain.get("content")
        if isinstance(content, list):
            parts = [_text_part(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)]
            plain["content"] = parts if wanted == "openai" else "\n".join(part["text"] for part in parts)
        elif isinstance(content, str) and wanted == "openai":
            plain["content"] = [{"type": "text", "text": content}]
        elif content is not None and not isinstance(content, str):
            raise ChatTemplateError(f"messages[{index}].content is a {type(content).__name__}, expected text or a list")
        converted.append(_with_reasoning_names(plain))
    return converted


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """A message's reasoning under each name that templates read: reasoning_content, and thinking (gpt-oss)."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _text_part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return {"type": "text", "text": text}
    came = f"a part of type {kind!r}" if isinstance(part, dict) else f"a {type(part).__name__}"
    raise ChatTemplateError(f"{where} is {came}; this model reads text parts only: {{'type': 'text', 'text': ...}}")
