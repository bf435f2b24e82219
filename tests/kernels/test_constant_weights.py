"""Products whose weights are constants of the graph, as exporters write them: found once, and fetched ahead of time."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from trivet.backends.contract.opset import DOMAIN, OPSET_VERSION, SESSION_NUM_THREADS

from . import reference
from .single_op import available_tiers, library_path, run_op

Array = NDArray[Any]

K = 64
TIER = available_tiers()[-1]
QKV: dict[str, Any] = {"formats": "q4_0,q8_0,q4_0", "in_features": K, "out_features": [80, 17, 17], "epilogue": "none"}
GATED: dict[str, Any] = {"formats": "q4_1,q4_1", "in_features": K, "out_features": [K, K], "epilogue": "swiglu"}
HEAD: dict[str, Any] = {"format": "q8_0", "in_features": K, "vocab_size": 500, "soft_cap": 0.0}


def weights(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    rows = {"q": ("q4_0", 80), "k": ("q8_0", 17), "v": ("q4_0", 17), "gate": ("q4_1", K), "up": ("q4_1", K)}
    found = {name: reference.random_weight(fmt, n, K, rng) for name, (fmt, n) in rows.items()}
    found["head"] = reference.random_weight("q8_0", 500, K, rng)
    found["bias"] = rng.standard_normal(80 + 17 + 17).astype(np.float32)
    return found


def open_chain(constants: dict[str, Array], num_threads: int) -> ort.InferenceSession:
    """x -> QMatMul(gate, up) -> QMatMul(q, k, v) and LogitsHead."""
    nodes = [
        helper.make_node("QMatMul", ["x", "", "gate", "up"], ["h"], domain=DOMAIN, **GATED),
        helper.make_node("QMatMul", ["h", "bias", "q", "k", "v"], ["qkv"], name="qkv", domain=DOMAIN, **QKV),
        helper.make_node("LogitsHead", ["h", "head"], ["logits"], domain=DOMAIN, **HEAD),
    ]
    inputs = [helper.make_tensor_value_info("x", 1, [None, K])]
    outputs = [helper.make_tensor_value_info(name, 1, None) for name in ("h", "qkv", "logits")]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "chain", inputs, outputs, initializers),
        opset_imports=[helper.make_opsetid(DOMAIN, OPSET_VERSION), helper.make_opsetid("", 18)],
        ir_version=10,
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(SESSION_NUM_THREADS, str(num_threads))
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def expected(constants: dict[str, Array], x: Array) -> tuple[Array, Array, Array]:
    """The same ops one by one, their weights handed in with every call, on one thread."""
    options: dict[str, Any] = {"tier": TIER, "num_threads": 1}
    gated = {"x": x, "w0": constants["gate"], "w1": constants["up"]}
    h = run_op("QMatMul", gated, GATED, outputs={"y": x.shape}, **options)["y"]
    merged = {"x": h, "bias": constants["bias"]} | {f"w{i}": constants[name] for i, name in enumerate("qkv")}
    qkv = run_op("QMatMul", merged, QKV, outputs={"y": (len(x), 114)}, **options)["y"]
    head = {"x": h, "weight": constants["head"]}
    return h, qkv, run_op("LogitsHead", head, HEAD, outputs={"logits": (len(x), 500)}, **options)["logits"]


@pytest.mark.skipif(TIER == "cuda", reason="of the CPU's op library")
@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_constant_weights_give_the_bits_of_weights_that_come_with_a_call(num_threads: int) -> None:
    """Also right after a session ended: its threads may still be fetching weights that are gone by then."""
    for seed in range(3):
        constants = weights(seed)
        session = open_chain(constants, num_threads)
        for rows in (1, 1, 5, 1):
            x = np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float32)
            got = session.run(None, {"x": x})
            for result, wanted in zip(got, expected(constants, x), strict=True):
                np.testing.assert_array_equal(result, wanted)
        del session


@pytest.mark.skipif(TIER == "cuda", reason="of the CPU's op library")
@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("k", np.zeros((17, 67), np.uint8), r"QMatMul 'qkv': w1: expected shape \[17, 68\], got \[17, 67\]"),
        ("bias", np.zeros(113, np.float32), r"QMatMul 'qkv': bias: expected shape \[114\], got \[113\]"),
        ("head", np.zeros((499, 68), np.uint8), r"weight: expected shape \[500, 68\], got \[499, 68\]"),
    ],
)
def test_a_constant_of_a_wrong_shape_is_refused_when_the_session_is_made(name: str, bad: Array, message: str) -> None:
    with pytest.raises(Exception, match=message):
        open_chain(weights(0) | {name: bad}, num_threads=1)
