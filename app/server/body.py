"""Reading a JSON request body: bounded, strict, and refused in words."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from .errors import APIError, BodyTooLargeError, bad_request

Model = TypeVar("Model", bound=BaseModel)

_NUM_NAMED = 10  # unknown fields that an answer names
_NUM_SHOWN = 80  # characters of a value that an answer repeats
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = _NUM_SHOWN
_BRIEF.maxlist = _BRIEF.maxdict = _NUM_SHOWN // 3

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # written as an escape, the only way into UTF-8
_LONE = re.compile("[\ud800-\udfff]")  # the decoder joins pairs

# pydantic's names of what a field may be -> ours; it puts them into locations, too
_ALTERNATIVES = {
    "str": "a string",
    "list[str]": "a list of strings",
    "list[int]": "a list of token ids",
    "list[list[int]]": "a list of lists of token ids",
    "list[TextPart]": "a list of text parts",
}


class UnknownFieldsError(ValueError):
    """Fields of one object, which a validator refuses together."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__("unknown fields")
        self.names = names


async def read_json(request: Request, max_bytes: int) -> Any:
    """The decoded body. A body that is too large gets 413: before it is read where its length is declared."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise bad_request(f"the Content-Type is {media_type or 'missing'}; application/json is expected")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise bad_request(f"the Content-Encoding is {encoding}; only an uncompressed body is accepted")
    body = await _read_bounded(request, max_bytes)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from error
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error
    except ValueError as error:  # also JSONDecodeError, and integers of thousands of digits
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if _SURROGATE.search(text):
        _refuse_lone_surrogates(content)
    return content


def _refuse_lone_surrogates(content: Any) -> None:
    """Such a string has no encoding: it could be neither tokenised nor sent back."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and (lone := _LONE.search(value)):
            raise bad_request(f"the body holds the lone surrogate \\u{ord(lone[0]):04x}, which is no character")


def parse(model: type[Model], content: Any) -> Model:
    """Validate a decoded body; APIError 400 names the first field at fault and how many others there are."""
    if not isinstance(content, dict):
        raise bad_request(f"the body must be a JSON object, got {_json_type(content)}")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _describe(error) from error


async def _read_bounded(request: Request, max_bytes: int) -> bytes:
    too_large = BodyTooLargeError(
        413,
        f"the body is larger than the {max_bytes} bytes this server accepts (--max-body-bytes)",
        headers={"Connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise too_large
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise bad_request("the client left before the body was complete") from error
    return b"".join(chunks)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number; a finite number is expected")


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _describe(error: ValidationError) -> APIError:
    """One line for a client out of pydantic's list of errors."""
    details = error.errors(include_url=False)
    for detail in details:
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, UnknownFieldsError):
            where = [path] if (path := _path(detail["loc"])) else []
            names = [".".join([*where, _cut(name)]) for name in cause.names[:_NUM_NAMED]]
            num_more = len(cause.names) - len(names)
            listed = ", ".join(map(repr, names)) + (f" and {num_more} more" if num_more else "")
            return bad_request(f"unknown field {listed}: this server has no such field; leave it out", names[0])
    first, expected, num_others = _first_fault(details)
    param = _path(first["loc"]) or None
    message = f"input should be {expected}" if expected else first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return bad_request(f"field {param!r} is missing", param)
    if param is None:
        return bad_request(message)
    more = f" (and {num_others} more)" if num_others else ""
    shown = _shown(first["input"])
    return bad_request(f"{param}: {message[0].lower()}{message[1:]}, got {shown}{more}", param.partition(".")[0])


def _path(location: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in location if part not in _ALTERNATIVES)


def _first_fault(details: Sequence[Any]) -> tuple[Any, str, int]:
    """The fault to name, what is expected in its place if it has alternatives, and how many others there are.

    A value that fits none of its alternatives is one fault: that of the alternative that came furthest.
    """
    places = [_before_alternatives(detail["loc"]) for detail in details]
    same = [detail for detail, place in zip(details, places, strict=True) if place == places[0]]
    first = max(same, key=lambda detail: len(detail["loc"]))
    depth = len(places[0])
    expected = ", or ".join(_ALTERNATIVES[detail["loc"][depth]] for detail in same if len(detail["loc"]) == depth + 1)
    return first, expected if len(first["loc"]) == depth + 1 else "", len(set(places)) - 1


def _before_alternatives(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    return tuple(takewhile(lambda part: part not in _ALTERNATIVES, location))


def _shown(value: Any) -> str:
    """The beginning of a value, which may be as large as the body."""
    return _cut(repr(value[:_NUM_SHOWN]) if isinstance(value, str) else _BRIEF.repr(value))


def _cut(text: str) -> str:
    return f"{text[:_NUM_SHOWN]}…" if len(text) > _NUM_SHOWN else text
