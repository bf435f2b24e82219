"""Where the weights of a serialised graph lie. The onnx package could tell, too, but its import takes half a start."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple

# Field numbers of onnx.proto.
_GRAPH: Final = 7  # of ModelProto
_NODE, _INITIALIZER = 1, 5  # of GraphProto
_INPUT, _OP_TYPE = 1, 4  # of NodeProto
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 13, 14  # of TensorProto
_KEY, _VALUE = 1, 2  # of StringStringEntryProto
_UINT8: Final = 2  # a data_type
_EXTERNAL: Final = 1  # a data_location

_NUMBER, _BYTES = 0, 2  # wire types
_FIXED: Final = {1: 8, 5: 4}  # wire type -> bytes


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
    for data in _Message(model).parts[_GRAPH]:
        graph = _Message(data)
        looked_up = _inputs_of("EmbedTokens", graph) - _inputs_of("LogitsHead", graph)
        for initializer in graph.parts[_INITIALIZER]:
            tensor = _Message(initializer)
            if tensor.numbers[_DATA_LOCATION] == [_EXTERNAL]:
                yield _external_tensor(tensor, looked_up)


def _inputs_of(op_type: str, graph: _Message) -> set[str]:
    """Names of what the nodes of one op read."""
    candidates = [node for node in graph.parts[_NODE] if op_type.encode() in node]  # to read all takes 2 ms
    nodes = [node for node in map(_Message, candidates) if node.text(_OP_TYPE) == op_type]
    return {name.decode() for node in nodes for name in node.parts[_INPUT]}


def _external_tensor(tensor: _Message, looked_up: set[str]) -> ExternalTensor:
    name, shape = tensor.text(_NAME), tuple(tensor.numbers[_DIMS])
    entries = [_Message(entry) for entry in tensor.parts[_EXTERNAL_DATA]]
    place = {entry.text(_KEY): entry.text(_VALUE) for entry in entries}
    is_whole = {"location", "offset"} <= place.keys() and place.get("length") == str(math.prod(shape))
    if tensor.numbers[_DATA_TYPE] != [_UINT8] or not is_whole:
        raise ValueError(f"weight {name!r}: expected the bytes of a uint8 tensor of shape {shape}, got {place}")
    return ExternalTensor(name, shape, place["location"], int(place["offset"]), name in looked_up)


class _Message:
    """A protobuf message's fields by number; wire types other than numbers and bytes are skipped."""

    def __init__(self, data: bytes) -> None:
        self.numbers: defaultdict[int, list[int]] = defaultdict(list)
        self.parts: defaultdict[int, list[bytes]] = defaultdict(list)
        at, end = 0, len(data)
        while at < end:
            tag, at = (data[at], at + 1) if data[at] < 0x80 else _number(data, at)  # nearly all numbers are that short
            field, wire_type = tag >> 3, tag & 7
            if wire_type in _FIXED:
                at += _FIXED[wire_type]
            elif wire_type in (_NUMBER, _BYTES):
                value, at = (data[at], at + 1) if at < end and data[at] < 0x80 else _number(data, at)
                if wire_type == _NUMBER:
                    self.numbers[field].append(value)
                    continue
                self.parts[field].append(data[at : at + value])
                at += value
            else:
                raise ValueError(f"not a graph: wire type {wire_type}")
        if at != end:
            raise ValueError("not a graph: a field ends past the end")

    def text(self, field: int) -> str:
        return self.parts[field][-1].decode() if field in self.parts else ""


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
