"""`--device` and `--require-gpu` where no GPU is visible: a fallback is said, a requirement is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from trivet.backends.cuda.device import describe_cuda

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
RUN = ("complete", "Hello", "--temperature", 0, "--max-tokens", 4, "-m")


def test_fallback_is_one_loud_line(cli: Any, llama: Path) -> None:
    expected = cli(*RUN, llama, **NO_GPU)
    result = cli(*RUN, llama, "--device", "cuda", **NO_GPU)
    assert result.status == 0 and result.out == expected.out
    loud = [line for line in result.err.splitlines() if line not in expected.err.splitlines()]
    assert len(loud) == 1 and loud[0].startswith("RUNNING ON THE CPU, a GPU was asked for: no GPU can be used: ")


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        (["--require-gpu"], 1, "a GPU is required (require_gpu) and none can be used: "),
        (["--require-gpu", "--device", "cuda"], 1, "a GPU is required (require_gpu) and none can be used: "),
        (["--device", "cuda:0"], 1, "device 'cuda:0' cannot be used: "),
        (["--require-gpu", "--device", "cpu"], 2, "device is 'cpu'; expected a GPU, as require_gpu is set"),
    ],
)
def test_a_required_gpu_that_is_missing_ends_the_command(
    cli: Any, llama: Path, flags: list[str], status: int, says: str
) -> None:
    result = cli(*RUN, llama, *flags, **NO_GPU)
    assert (result.status, result.out) == (status, "")
    assert says in result.err.splitlines()[-1]


def test_a_missing_gpu_is_said_before_anything_is_fetched(cli: Any) -> None:
    result = cli(*RUN, "hf:nobody/nothing:Q4_0", "--require-gpu", **NO_GPU)
    assert result.status == 1 and "a GPU is required" in result.err


def test_the_server_says_it_in_its_log_and_in_the_health_detail(cli: Any, llama: Path) -> None:
    with cli.serving(llama, "--device", "cuda", **NO_GPU) as (url, process):
        assert httpx.get(f"{url}/health").content == b""
        detail = httpx.get(f"{url}/health?detail=1").json()
        assert (detail["status"], detail["device"]) == ("ok", "cpu")
        assert detail["device_fallback"].startswith("no GPU can be used: ")
        assert detail["stats"]["num_requests_running"] == 0
        process.terminate()
        assert process.wait(20) == 0
    with cli.serving(llama, **NO_GPU) as (url, _):
        assert "device_fallback" not in httpx.get(f"{url}/health?detail=1").json()


def test_doctor_counts_a_fallback_as_a_problem(cli: Any) -> None:
    result = cli("doctor", "--json", "--device", "cuda", **NO_GPU)
    report = json.loads(result.out)
    assert result.status == 1 and report["device"]["chosen"] == "cpu"
    assert report["problems"] == [f"models would run on the CPU: {report['device']['fallback']}"]
    assert cli("doctor", "--json", **NO_GPU).json()["device"] == {"chosen": "cpu"}


def test_doctor_has_one_line_for_gpus_where_there_is_none(cli: Any) -> None:
    library = describe_cuda()["library"]
    cuda = cli("doctor", "--json", **NO_GPU).json()["cuda"]
    assert (cuda["library"], cuda["devices"]) == (library or "not built", {}) and cuda["error"]
    result = cli("doctor", **NO_GPU)
    lines = [line.split(maxsplit=1)[1] for line in result.out.splitlines() if line.startswith("cuda")]
    assert lines == [f"no GPU can be used: {cuda['error'] if library else 'this trivet was built without CUDA'}"]
    wanted = cli("doctor", "--device", "cuda", **NO_GPU)
    assert f"problem: models would run on the CPU: no GPU can be used: {cuda['error']}" in wanted.out
