"""Times the matrix ops of libtrivet_cpu: one line per tier, format and number of rows.

    python tests/tools/bench_ops.py [--tiers avx2,avx512_vnni] [--formats q4_1,q4_k] [--rows 1,512] [--n 1536] [--k 576]

GMAC/s = rows * n * k / s; GB/s = weight bytes / s (what bounds one row); the weights of `--copies` matrices are used in
turn, so that with enough of them they come from memory and not from a cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime as ort
from onnx import helper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "packaging" / "python"), str(ROOT / "tests" / "kernels")]

from reference import random_weight  # noqa: E402
from trivet.backends.contract.opset import DOMAIN, OPSET_VERSION, SESSION_CPU_TIER, SESSION_NUM_THREADS  # noqa: E402
from trivet.backends.library import cpu_library_path, probe_cpu  # noqa: E402


def build_session(
    fmt: str, n: int, k: int, copies: int, tier: str, threads: int, activation: str
) -> ort.InferenceSession:
    """A graph of `copies` QMatMul nodes that share x."""
    rng = np.random.default_rng(0)
    nodes, weights, outputs = [], [], []
    for i in range(copies):
        weight = random_weight(fmt, n, k, rng)
        weights.append(helper.make_tensor(f"w{i}", 2, weight.shape, weight.tobytes(), raw=True))
        attributes: dict[str, Any] = {"formats": fmt, "in_features": k, "out_features": [n], "epilogue": "none"}
        nodes.append(helper.make_node("QMatMul", ["x", "", f"w{i}"], [f"y{i}"], domain=DOMAIN, **attributes))
        outputs.append(helper.make_tensor_value_info(f"y{i}", 1, None))
    graph = helper.make_graph(nodes, "bench", [helper.make_tensor_value_info("x", 1, [None, k])], outputs[-1:], weights)
    opsets = [helper.make_opsetid(DOMAIN, OPSET_VERSION), helper.make_opsetid("", 18)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(SESSION_CPU_TIER, tier)
    options.add_session_config_entry(SESSION_NUM_THREADS, str(threads))
    options.add_session_config_entry("trivet.activation_dtype", activation)
    options.register_custom_ops_library(str(cpu_library_path()))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def best_seconds(session: ort.InferenceSession, x: np.ndarray, budget: float) -> float:
    best, end = float("inf"), time.perf_counter() + budget
    while True:
        start = time.perf_counter()
        session.run(None, {"x": x})
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def main() -> None:
    probed = probe_cpu()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", default=probed["best_tier"])
    parser.add_argument("--formats", default="q4_0,q4_1,q5_0,q5_1,q8_0,q4_k,q5_k,q6_k,f16,bf16,f32")
    parser.add_argument("--rows", default="1,8,512")
    parser.add_argument("--n", type=int, default=1536)
    parser.add_argument("--k", type=int, default=768)
    parser.add_argument("--copies", type=int, default=30)
    parser.add_argument("--threads", type=int, default=probed["num_threads"])
    parser.add_argument("--activation", default="int8")
    parser.add_argument("--seconds", type=float, default=0.5, help="per line")
    args = parser.parse_args()
    print(f"{'tier':12} {'format':6} {'rows':>5} {'us':>10} {'GMAC/s':>8} {'GB/s':>7}   n={args.n} k={args.k}", end="")
    print(f" copies={args.copies} threads={args.threads}")
    for tier in args.tiers.split(","):
        for fmt in args.formats.split(","):
            session = build_session(fmt, args.n, args.k, args.copies, tier, args.threads, args.activation)
            nbytes = random_weight(fmt, args.n, args.k, np.random.default_rng(0)).nbytes
            for rows in map(int, args.rows.split(",")):
                x = np.random.default_rng(1).standard_normal((rows, args.k), np.float32)
                seconds = best_seconds(session, x, args.seconds) / args.copies
                print(
                    f"{tier:12} {fmt:6} {rows:5} {seconds * 1e6:10.1f} "
                    f"{rows * args.n * args.k / seconds / 1e9:8.1f} {nbytes / seconds / 1e9:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
