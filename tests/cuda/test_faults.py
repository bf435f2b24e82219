"""What goes wrong on a device that is there: a CUDA error, too little memory, neighbours."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trivet import LLM, SamplingParams
from trivet.backends.cuda.device import CudaDevice
from trivet.backends.errors import DeviceMemoryError
from trivet.runtime.errors import TrivetError

from .require import needs_device

pytestmark = needs_device

PROMPTS = [[*range(20 + i, 60 + 2 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
# Nothing else may use the device meanwhile.
fills_device = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="takes all memory of the device, so it runs without pytest's -n"
)
OPTIONS: dict[str, Any] = {"device": "cuda", "gpu_memory_utilization": 0.05, "max_model_len": 512}
FIGURES = r"\d+ of \d+ bytes are free: out of memory"

# From the moment that the file exists, the KV cache lies where this process has no memory.
FAULTY_SERVER = """
import os, sys
from trivet.app.cli import main
from trivet.backends.cuda.session import CudaSession
switch, run = sys.argv.pop(), CudaSession._run

def faulty(session, inputs, outputs):
    if os.path.exists(switch):
        session._kv["address"] = 1 << 12
        session._is_decode = lambda inputs: False
    return run(session, inputs, outputs)

CudaSession._run = faulty
sys.exit(main(sys.argv[1:]))
"""
NEIGHBOUR = """
import json, sys
from trivet import LLM, SamplingParams
prompts, options = json.loads(sys.argv[2])
greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
with LLM(sys.argv[1], **options) as llm:
    for _ in range(int(sys.argv[3])):
        print(json.dumps([list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy)]), flush=True)
"""


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture
def checkpoint(tiny: Callable[[str, str], Path], trivet_home: Path) -> Path:
    return tiny("llama", "safetensors")


@contextmanager
def full_device() -> Iterator[None]:
    """All memory of the device but some crumbs is taken."""
    hog = CudaDevice(0)
    try:
        num_bytes = 16 << 30
        while num_bytes >= 1 << 20:
            try:
                hog.allocate(num_bytes)
            except DeviceMemoryError:
                num_bytes //= 2
        yield
    finally:
        hog.close()


@contextmanager
def neighbour(checkpoint: Path, rounds: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that generates on the same device; its standard output has the tokens of each round."""
    command = [sys.executable, "-c", NEIGHBOUR, str(checkpoint), json.dumps([PROMPTS, OPTIONS]), str(rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_cuda_error_ends_the_engine_and_then_the_server(checkpoint: Path, tmp_path: Path) -> None:
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    switch = tmp_path / "fault"
    command = [sys.executable, "-c", FAULTY_SERVER, "serve", str(checkpoint), "--port", "0", "--device", "cuda"]
    command += ["--gpu-memory-utilization", "0.05", str(switch)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stderr is not None
    log: list[str] = []
    try:
        url = ""
        for line in process.stderr:
            log.append(line)
            if line.startswith("Serving "):
                url = line.split(" on ")[1].split()[0]
                break
        assert url, "".join(log)
        assert any(re.search(r"Device cuda:0 is .* kernels of SM \d", line) for line in log)
        errors: list[Any] = []

        def request(index: int) -> None:
            body = {"prompt": f"Hello {index}", "max_tokens": 900, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                for number, text in enumerate(response.iter_lines()):
                    if number == 3:
                        switch.touch()
                    if '"error"' in text:
                        errors.append(json.loads(text[6:])["error"])

        threads = [threading.Thread(target=request, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [error["code"] for error in errors] == [503, 503, 503]
        assert all("CUDA" in error["message"] for error in errors), errors
        assert httpx.get(f"{url}/health").status_code == 503
        detail = httpx.get(f"{url}/health?detail=1").json()
        assert (detail["status"], detail["device"]) == ("dead", "cuda:0")
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("visible", ["", "99"])
def test_devices_that_are_hidden_are_not_used(visible: str, checkpoint: Path) -> None:
    command = [sys.executable, "-m", "trivet", "run", "-m", str(checkpoint), "hello", "--max-tokens", "2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *flags], env=environment, capture_output=True, text=True, check=False)

    reason = f"no CUDA device is visible (CUDA_VISIBLE_DEVICES={visible})"
    fallen_back = run("--device", "cuda")
    assert fallen_back.returncode == 0 and "RUNNING ON THE CPU" in fallen_back.stderr and reason in fallen_back.stderr
    for flags in (["--device", "cuda:0"], ["--require-gpu"]):
        refused = run(*flags)
        assert refused.returncode == 1 and reason in refused.stderr, refused.stderr


@fills_device
def test_too_little_memory_at_load_is_refused_with_figures(checkpoint: Path) -> None:
    with full_device(), pytest.raises(TrivetError, match=FIGURES):
        LLM(str(checkpoint), **OPTIONS)
    with pytest.raises(TrivetError, match=rf"no KV cache of .*cannot allocate \d+ bytes on device 0, {FIGURES}"):
        LLM(str(checkpoint), **OPTIONS | {"kv_cache_memory_bytes": 1 << 40, "max_num_seqs": 4})
    with LLM(str(checkpoint), **OPTIONS) as llm:
        assert all(len(tokens) == 40 for tokens in tokens_of(llm))


def test_two_processes_share_a_device(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **OPTIONS) as llm, neighbour(checkpoint, 8) as process:
        expected = tokens_of(llm)
        assert process.stdout is not None
        for line in process.stdout:
            assert json.loads(line) == expected
            assert tokens_of(llm) == expected
        assert process.wait(60) == 0


def test_a_neighbour_that_is_killed_harms_nobody(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **OPTIONS) as llm:
        expected = tokens_of(llm)
        with neighbour(checkpoint, 100000) as process:
            assert process.stdout is not None and json.loads(process.stdout.readline()) == expected
            timer = threading.Timer(0.05, process.send_signal, (signal.SIGKILL,))
            timer.start()
            for _ in range(5):
                assert tokens_of(llm) == expected
            timer.join()
            assert process.wait(30) == -signal.SIGKILL
        assert tokens_of(llm) == expected


@fills_device
def test_too_little_memory_in_a_step_fails_its_requests_and_the_engine_lives(checkpoint: Path) -> None:
    long = [[20 + (i + j) % 300 for j in range(480)] for i in range(12)]
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
    with LLM(str(checkpoint), max_num_batched_tokens=8192, **OPTIONS) as llm:
        expected = tokens_of(llm)
        with full_device():
            failed = llm.generate(long, greedy)
            assert {output.outputs[0].finish_reason for output in failed} == {"error"}
            assert all(re.search(FIGURES, output.error or "") for output in failed), failed[0].error
            assert tokens_of(llm) == expected
        again = llm.generate(long, greedy)
        assert {output.outputs[0].finish_reason for output in again} == {"length"}
        assert tokens_of(llm) == expected
