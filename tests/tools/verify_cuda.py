#!/usr/bin/env python3
"""Everything that a CUDA device has to show, in one call: kernel and engine tests, real models, memory checks, speed.

    verify_cuda.py [--json FILE] [--steps tests,models,sanitizer,speed] [--models FILE,...] [--formats q4_k,...]
                   [--rows 1,4,...]

Step models compares real models (those of the test cache, or those given; trim_model.py makes small ones) with the CPU:
perplexity, greedy tokens, captured against eager steps, alone against batched, preempted and cached.
Step sanitizer runs the op harness, at small sizes, under memcheck and racecheck.
Prints a table, writes all figures to FILE and ends with 1 if a step failed. Needs a built libtrivet_cuda and an NVIDIA
driver.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime as ort
import sanitize_cuda
from onnx import helper
from trivet.backends.contract.formats import FORMATS
from trivet.backends.contract.opset import DOMAIN, OPSET_VERSION, SESSION_ACTIVATION_DTYPE
from trivet.backends.cuda.device import CudaDevice, describe_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPES = {"1B": [(2048, 8192), (8192, 2048)], "8B": [(4096, 14336), (14336, 4096), (4096, 4096)]}  # (k, n)
REPEATS = 20
COPY_BYTES = 1 << 30
STEPS = ("tests", "models", "sanitizer", "speed")


def tests_step(log: Path | None) -> dict[str, Any]:
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "tests/cuda"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if log is not None:
        log.write_text(text)
    lines = text.strip().splitlines()
    return {"ok": done.returncode == 0, "seconds": time.monotonic() - started, "tail": lines[-12:]}


def copy_speed(device: CudaDevice) -> float:
    """Bytes read plus bytes written per second of a copy inside the device's memory."""
    a, b = device.allocate(COPY_BYTES), device.allocate(COPY_BYTES)
    for repeats in (3, REPEATS):
        device.finish()
        started = time.perf_counter()
        for _ in range(repeats):
            device.copy(b, a, COPY_BYTES)
        device.finish()
    seconds = time.perf_counter() - started
    device.release(a)
    device.release(b)
    return 2 * COPY_BYTES * REPEATS / seconds


def product_model(fmt: str, k: int, n: int, count: int) -> bytes:
    """`count` QMatMul nodes with different weights on one x."""
    nodes = [
        helper.make_node(
            "QMatMul",
            ["x", "", f"w{i}"],
            [f"y{i}"],
            domain=DOMAIN,
            name=f"n{i}",
            formats=fmt,
            in_features=k,
            out_features=[n],
            epilogue="none",
        )
        for i in range(count)
    ]
    inputs = [helper.make_tensor_value_info("x", 1, [None, k])]
    inputs += [helper.make_tensor_value_info(f"w{i}", 2, [n, FORMATS[fmt].row_bytes(k)]) for i in range(count)]
    outputs = [helper.make_tensor_value_info(f"y{i}", 1, [None, n]) for i in range(count)]
    graph = helper.make_graph(nodes, "products", inputs, outputs)
    opsets = [helper.make_opsetid(DOMAIN, OPSET_VERSION), helper.make_opsetid("", 18)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def product_seconds(device: CudaDevice, fmt: str, k: int, n: int, rows: int) -> float:
    """Seconds of one product: captured, over weights that together are larger than the caches."""
    num_bytes = n * FORMATS[fmt].row_bytes(k)
    count = min(64, max(2, -(-(300 << 20) // num_bytes)))
    options = ort.SessionOptions()
    options.enable_mem_pattern = False
    options.add_session_config_entry(SESSION_ACTIVATION_DTYPE, "int8")
    device.add_to(options, capture=True)
    session = ort.InferenceSession(product_model(fmt, k, n, count), options)
    binding: Any = session.io_binding()._iobinding
    place, held = device.ort_device(), []
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 60, num_bytes, np.uint8)  # halves of moderate size
    x = rng.standard_normal((rows, k), np.float32)

    def bind(name: str, value: Any, dtype: Any, shape: tuple[int, ...], num_bytes: int) -> int:
        address = device.allocate(num_bytes)
        held.append(address)
        if value is not None:
            device.copy(address, value.ctypes.data, num_bytes)
        (binding.bind_output if value is None else binding.bind_input)(name, place, dtype, shape, address)
        return address

    bind("x", x, np.float32, x.shape, x.nbytes)
    for i in range(count):
        bind(f"w{i}", raw, np.uint8, (n, num_bytes // n), num_bytes)
        bind(f"y{i}", None, np.float32, (rows, n), rows * n * 4)
    device.finish()
    run_options = ort.RunOptions()
    run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    eager = ort.RunOptions()
    run_options.add_run_config_entry("gpu_graph_id", "0")
    eager.add_run_config_entry("gpu_graph_id", "-1")
    session._sess.run_with_iobinding(binding, eager)
    best = float("inf")
    for repeats in (2, REPEATS, REPEATS):
        device.finish()
        started = time.perf_counter()
        for _ in range(repeats):
            session._sess.run_with_iobinding(binding, run_options)
        device.finish()
        best = min(best, (time.perf_counter() - started) / repeats / count)
    for address in held:
        device.release(address)
    return best


def speed_step(formats: list[str], row_counts: list[int]) -> dict[str, Any]:
    device = CudaDevice(0)
    copy = copy_speed(device)
    print(f"copy inside the device: {copy / 1e9:.0f} GB/s read + written")
    rows: list[dict[str, Any]] = []
    for fmt in formats:
        for model, shapes in SHAPES.items():
            for k, n in shapes:
                for m in row_counts:
                    if m > 1 and (model == "1B" or n == 4096 == k):
                        continue
                    seconds = product_seconds(device, fmt, k, n, m)
                    num_bytes = n * FORMATS[fmt].row_bytes(k)
                    row = {
                        "format": fmt,
                        "model": model,
                        "k": k,
                        "n": n,
                        "rows": m,
                        "us": seconds * 1e6,
                        "gb_per_s": num_bytes / seconds / 1e9,
                        "of_copy": num_bytes / seconds / copy,
                        "tflops": 2 * m * n * k / seconds / 1e12,
                    }
                    rows.append(row)
                    print(
                        f"{fmt:6} {model} k={k:5} n={n:5} rows={m:4} {row['us']:9.1f} us {row['gb_per_s']:6.0f} GB/s "
                        f"{row['of_copy']:6.1%} of copy {row['tflops']:7.1f} TFLOP/s",
                        flush=True,
                    )
    device.close()
    return {"ok": True, "copy_bytes_per_second": copy, "products": rows}


def models_step(paths: list[Path]) -> dict[str, Any]:
    import verify_models

    rows = [verify_models.check_model(path) for path in paths]
    print(verify_models.table(rows) if rows else "no models: fetch_models.py brings them, --models names others")
    return {"ok": bool(rows) and all(row["ok"] for row in rows), "rows": rows}


def cached_models() -> list[Path]:
    folder = os.environ.get("TRIVET_TEST_MODELS") or Path.home() / ".cache" / "trivet-tests" / "models"
    return sorted(Path(folder).glob("*.gguf"))


def outcome(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"NOT RUN, {result['skipped']}"
    return "ok" if result["ok"] else "FAILED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file; logs go beside it")
    parser.add_argument("--steps", default=",".join(STEPS), help="default: all, %(default)s")
    parser.add_argument("--models", help="GGUF files, separated by commas (default: those of the test cache)")
    parser.add_argument("--formats", default="q4_k,q8_0,q6_k,bf16")
    parser.add_argument("--rows", default="1,4,16,64,2048", help="rows of x, of the products of the step speed")
    parser.add_argument("--sanitizer-minutes", type=float, default=60.0, help="end it after so long (default: 60)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.steps.split(",") if name not in STEPS]:
        parser.error(f"--steps: unknown step {unknown[0]!r}; known: {', '.join(STEPS)}")
    facts = describe_cuda()
    print(json.dumps(facts, indent=1))
    if facts["error"]:
        return 1
    logs = arguments.json.parent if arguments.json else None
    results: dict[str, Any] = {"device": facts}
    for name in arguments.steps.split(","):
        if name == "tests":
            results[name] = tests_step(logs and logs / "tests.log")
        elif name == "models":
            given = [Path(path) for path in arguments.models.split(",")] if arguments.models else cached_models()
            results[name] = models_step(given)
        elif name == "sanitizer":
            results[name] = sanitize_cuda.sanitizer_step(logs, arguments.sanitizer_minutes)
        else:
            results[name] = speed_step(arguments.formats.split(","), [int(m) for m in arguments.rows.split(",")])
        print(f"{name}: {outcome(results[name])}", *results[name].get("tail", []), sep="\n  ", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0 if all(r["ok"] for n, r in results.items() if n != "device") else 1


if __name__ == "__main__":
    sys.exit(main())
