"""Where the weights of a serialised graph lie. The onnx package could tell, too, but its import takes half a start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

_NUMBER, _BYTES = 0, 2  # wire types
_FIXED: Final = {1: 8, 5: 4}  # wire type -> bytes

# Tags of onnx.proto: field number << 3 | wire type.
_GRAPH: Final = 7 << 3 | _BYTES  # of ModelProto
_NODE, _INITIALIZER = 1 << 3 | _BYTES, 5 << 3 | _BYTES  # of GraphProto
_INPUT, _OP_TYPE = 1 << 3 | _BYTES, 4 << 3 | _BYTES  # of NodeProto
_DIM, _DATA_TYPE, _DATA_LOCATION = 1 << 3 | _NUMBER, 2 << 3 | _NUMBER, 14 << 3 | _NUMBER  # of TensorProto
_NAME, _EXTERNAL_DATA = 8 << 3 | _BYTES, 13 << 3 | _BYTES
_KEY, _VALUE = 1 << 3 | _BYTES, 2 << 3 | _BYTES  # of StringStringEntryProto
_UINT8: Final = 2  # a data_type
_EXTERNAL: Final = 1  # a data_location


class ExternalTensor(NamedTuple):
    """A uint8 tensor whose content is in a file beside the graph."""

    name: str
    shape: tuple[int, ...]
    location: str  # file name
    offset: int
    is_looked_up: bool  # a step reads the rows of its tokens, not all of it: an embedding that is not the head, too


def external_tensors(model: bytes) -> Iterator[ExternalTensor]:
    """The external initializers of a serialised ModelProto.

    Raises ValueError when `model` is not one, or one of them is not uint8, not as long as its shape says, or lacks its
    file or offset.
    """
    for tag, value in _fields(model):
        if tag == _GRAPH:
            graph = [*_fields(value)]
            looked_up = _inputs_of("EmbedTokens", graph) - _inputs_of("LogitsHead", graph)
            for tag, value in graph:
                if tag == _INITIALIZER and (tensor := _external_tensor(value, looked_up)) is not None:
                    yield tensor


def _inputs_of(op_type: str, graph: list[tuple[int, Any]]) -> set[str]:
    """Names of what the nodes of one op read."""
    wanted = op_type.encode()
    candidates = [value for tag, value in graph if tag == _NODE and wanted in value]  # to read all takes 2 ms
    nodes = [node for node in map(list, map(_fields, candidates)) if (_OP_TYPE, wanted) in node]
    return {value.decode() for node in nodes for tag, value in node if tag == _INPUT}


def _external_tensor(initializer: bytes, looked_up: set[str]) -> ExternalTensor | None:
    """None: its content is in the graph."""
    name, location, data_type = "", 0, 0
    shape: list[int] = []
    place: dict[str, str] = {}
    for tag, value in _fields(initializer):
        if tag == _DIM:
            shape.append(value)
        elif tag == _EXTERNAL_DATA:
            entry = dict(_fields(value))
            place[entry.get(_KEY, b"").decode()] = entry.get(_VALUE, b"").decode()
        elif tag == _NAME:
            name = value.decode()
        elif tag == _DATA_TYPE:
            data_type = value
        elif tag == _DATA_LOCATION:
            location = value
    if location != _EXTERNAL:
        return None
    is_whole = {"location", "offset"} <= place.keys() and place.get("length") == str(math.prod(shape))
    if data_type != _UINT8 or not is_whole:
        raise ValueError(f"weight {name!r}: expected the bytes of a uint8 tensor of shape {tuple(shape)}, got {place}")
    return ExternalTensor(name, tuple(shape), place["location"], int(place["offset"]), name in looked_up)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Tags and values of a protobuf message's fields; wire types other than numbers and bytes are skipped."""
    at, end = 0, len(data)
    while at < end:
        tag, at = (data[at], at + 1) if data[at] < 0x80 else _number(data, at)  # nearly all numbers are that short
        wire_type = tag & 7
        if wire_type in (_BYTES, _NUMBER):
            value, at = (data[at], at + 1) if at < end and data[at] < 0x80 else _number(data, at)
            if wire_type == _NUMBER:
                yield tag, value
                continue
            yield tag, data[at : at + value]
            at += value
        elif wire_type in _FIXED:
            at += _FIXED[wire_type]
        else:
            raise ValueError(f"not a graph: wire type {wire_type}")
    if at != end:
        raise ValueError("not a graph: a field ends past the end")


def _number(data: bytes, at: int) -> tuple[int, int]:
    """The varint at `at`, and where it ends."""
    value = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
    raise ValueError("not a graph: a number without an end")
