"""Chat templates: Jinja in a sandbox, with the names and rules that published templates are written for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .content_format import detect_content_format, to_content_format
from .errors import ChatTemplateError

MAX_RENDERED_CHARS = 64 * 1024 * 1024  # no context is this long; a template that writes more is broken or hostile
MAX_DEPTH = 100  # of lists and objects that a template gets
MAX_REPEATED = 1_000_000  # items of `text * n` and `list * n`
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; rendering writes the body as it is."""

    tags = {"generation"}  # noqa: RUF012 (the name jinja2 reads)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(...)` of templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace(...)` of templates; names that begin with an underscore stay out of reach."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace attribute must not begin with an underscore: {name!r}")


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox where arithmetic cannot eat the memory either (`range` is limited by jinja2 itself)."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.TemplateError("the operator ** is not available in chat templates")
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(times, int) and len(text) * times > MAX_REPEATED:
                raise jinja2.TemplateError(f"a text or list repeated to more than {MAX_REPEATED} items")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class ChatTemplate:
    """One compiled template. Safe to share between threads."""

    def __init__(self, source: str) -> None:
        """Raises ChatTemplateError, with the line, if `source` is not a Jinja template."""
        self.source = source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.content_format: Literal["string", "openai"] = detect_content_format(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from error
        except (RecursionError, OverflowError, MemoryError) as error:
            raise ChatTemplateError(f"the chat template cannot be compiled ({type(error).__name__})") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        content_format: Literal["auto", "string", "openai"] = "auto",
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the conversation.

        `content_format`: how message contents reach the template, as text or as OpenAI's list of parts; "auto" = as the
        template reads them. `variables`: bos_token, a request's chat_template_kwargs and the like; messages, tools,
        documents and add_generation_prompt are refused there. Raises ChatTemplateError.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt exclude each other: the one goes on with the last "
                "message, the other begins a new one. Set add_generation_prompt to false"
            )
        taken = {"messages", "tools", "documents", "add_generation_prompt"} & set(variables or ())
        if taken:
            raise ChatTemplateError(f"chat template variables must not be named {', '.join(sorted(taken))}")
        chat = to_content_format(messages, self.content_format if content_format == "auto" else content_format)
        continued = _mark_final_message(chat, self.source) if continue_final_message else None
        text = self._generate(
            {
                "messages": chat,
                "tools": _plain(tools) if tools is not None else None,
                "documents": _plain(documents) if documents is not None else None,
                "add_generation_prompt": add_generation_prompt,
                **_plain(variables or {}),
            }
        )
        return text if continued is None else _cut_after_final_message(text, continued)

    def _generate(self, variables: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise ChatTemplateError(f"the chat template wrote more than {MAX_RENDERED_CHARS} characters")
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the conversation: {error.message}") from error
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program and can fail in any way; none may harm the caller
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return "".join(parts)


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy in JSON's own types, so that a template never holds an object with methods of ours."""
    if depth > MAX_DEPTH:
        raise ChatTemplateError(f"chat template input is nested deeper than {MAX_DEPTH} levels")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    for base in (str, bool, int, float):
        if isinstance(value, base):
            return base.__str__(value) if base is str else base(value)
    raise ChatTemplateError(f"chat template input holds a {type(value).__name__}; expected JSON types only")


def _mark_final_message(chat: list[dict[str, Any]], source: str) -> str:
    """Put the tag behind the last message's text, in place; returns that text."""
    content = chat[-1].get("content") if chat else None
    if content is None:
        raise ChatTemplateError("continue_final_message needs a last message with content; it has none")
    if "content" not in source:
        raise ChatTemplateError("continue_final_message: the chat template never reads `content`")
    if isinstance(content, str):
        chat[-1]["content"] = content + _TAG
        return content
    for part in reversed(content):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _TAG
            return text
    raise ChatTemplateError("continue_final_message: the last message has no text part to go on with")


def _cut_after_final_message(rendered: str, final: str) -> str:
    """`rendered` up to the tag. A template that trims contents took the tag's space and the message's own with it."""
    at = rendered.rfind(_TAG.strip())
    if at < 0 or final.strip() not in rendered:
        raise ChatTemplateError(
            "continue_final_message: the chat template alters or leaves out the last message; it cannot be continued"
        )
    return rendered[:at] if rendered.startswith(_TAG, at) else rendered[:at].rstrip()
