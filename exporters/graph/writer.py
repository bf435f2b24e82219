"""Thin layer over onnx.helper: typed nodes of our domain, inline tensors, external tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ...backends.contract.opset import DOMAIN, GRAPH_INPUTS, GRAPH_OUTPUTS, OPS, OPSET_VERSION
from ..checkpoint.tensors import TensorInfo

IR_VERSION: Final = 10  # read by every onnxruntime since 1.18
ONNX_OPSET: Final = 21  # of the default domain, from which the graph uses nothing
_DTYPES: Final = {
    "float32": TensorProto.FLOAT,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
}


class GraphWriter:
    """Collects nodes and initializers; `finish()` makes the model."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.value_info: list[onnx.ValueInfoProto] = []

    def node(self, op: str, inputs: Sequence[str | None], outputs: Sequence[str], **attributes: Any) -> None:
        """Add a node of our domain; checks the attribute names and counts against the op's schema."""
        schema = OPS[op]
        required = sum(1 for name in schema.inputs if not name.endswith("?"))
        names = [name or "" for name in inputs]
        while names and not names[-1]:
            names.pop()
        assert required <= len(inputs) <= len(schema.inputs), (op, inputs)
        assert all(name or schema.inputs[i].endswith("?") for i, name in enumerate(names)), (op, inputs)
        assert set(attributes) == set(schema.attributes), (op, sorted(attributes))
        assert len(outputs) == len(schema.outputs), (op, outputs)
        self.nodes.append(
            helper.make_node(op, names, list(outputs), name=f"{op}:{outputs[0]}", domain=DOMAIN, **attributes)
        )

    def inline(self, name: str, values: NDArray[np.float32]) -> str:
        """A small float32 tensor inside the model."""
        if name not in self.initializers:
            contiguous = np.ascontiguousarray(values, dtype=np.float32)
            self.initializers[name] = numpy_helper.from_array(contiguous, name)
        return name

    def external(self, name: str, tensor: TensorInfo) -> str:
        """A weight matrix as uint8 [rows, row_bytes] that stays in its checkpoint file."""
        if name not in self.initializers:
            rows = tensor.shape[0]
            proto = TensorProto(name=name, data_type=TensorProto.UINT8, dims=[rows, tensor.nbytes // rows])
            proto.data_location = TensorProto.EXTERNAL
            entries = {"location": tensor.file.path.name, "offset": str(tensor.offset), "length": str(tensor.nbytes)}
            for key, value in entries.items():
                proto.external_data.add(key=key, value=value)
            self.initializers[name] = proto
        return name

    def describe(self, name: str, shape: Sequence[str | int]) -> None:
        """Record the type of an intermediate float32 value, so that it can be made an output."""
        self.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))

    def finish(self, name: str, producer_version: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info(n, _DTYPES[d], list(s)) for n, (d, s) in GRAPH_INPUTS.items()],
            [helper.make_tensor_value_info(n, _DTYPES[d], list(s)) for n, (d, s) in GRAPH_OUTPUTS.items()],
            list(self.initializers.values()),
            value_info=self.value_info,
        )
        opsets = [helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
        return helper.make_model(
            graph,
            producer_name="trivet",
            producer_version=producer_version,
            ir_version=IR_VERSION,
            opset_imports=opsets,
        )
