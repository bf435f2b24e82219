"""Weights go from the mapped file to the device: the host holds about one tensor of them at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .require import needs_device

TOOLS = Path(__file__).parents[1] / "tools"
LARGEST = 128256 * 1024 // 32 * 34  # bytes of the embedding
MAKE = """
import sys
from pathlib import Path
import bench_cuda_model as bench
bench.SHAPES["load"] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tied": True,
}
package, read = bench.make_package("load", "q8_0", Path(sys.argv[1]))
print(package, read.num_bytes)
"""
SLACK = 64 << 20  # pinned buffers, and what onnxruntime needs of its own
# Resident bytes of each kind, at most, above what an open device takes before the weights come.
LOAD = """
import json, sys, threading, time
from pathlib import Path
from trivet.backends.contract.manifest import read_manifest
from trivet.backends.cuda.device import CudaDevice, _ep_device
from trivet.backends.session import ModelSession

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return {l.split(":")[0]: int(l.split()[1]) << 10 for l in lines if l.startswith(("RssAnon", "RssFile", "RssShmem"))}

device = CudaDevice(0)
_ep_device(0)
before, peak, running = resident(), 0, True

def watch():
    global peak
    while running:
        peak = max(peak, sum(resident().values()) - sum(before.values()))
        time.sleep(0.0005)

watcher = threading.Thread(target=watch)
watcher.start()
package, started = Path(sys.argv[1]), time.perf_counter()
session = ModelSession(package, read_manifest(package), device="cuda")
seconds = time.perf_counter() - started
running = False
watcher.join()
print(json.dumps({"peak": peak, "seconds": seconds}))
"""


def run(code: str, *arguments: object, cwd: Path | None = None) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@needs_device
def test_the_host_holds_about_one_tensor(tmp_path: Path) -> None:
    package, num_bytes = run(MAKE, tmp_path, cwd=TOOLS).split()
    figures = json.loads(run(LOAD, package))
    held, read = figures["peak"] / 1e6, int(num_bytes) / 1e6
    print(f"{read:.0f} MB in {figures['seconds']:.2f} s; the host held {held:.0f} MB more than with an open device")
    assert int(num_bytes) > 3 * LARGEST
    assert figures["peak"] < LARGEST + SLACK, figures
