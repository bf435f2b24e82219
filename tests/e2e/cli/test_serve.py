"""`trivet serve` with the real engine."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def test_server_python_and_command_line_agree(cli: Any, llama: Path) -> None:
    from trivet import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(llama)) as llm:
        expected = llm.chat(HELLO, params)[0].outputs[0].text
        raw = llm.generate("Hello there", params)[0].outputs[0].text
    with cli.serving(llama) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY")
        name = client.models.list().data[0].id
        answer = client.chat.completions.create(model=name, messages=HELLO, **GREEDY)
        assert answer.choices[0].message.content == expected and answer.choices[0].finish_reason == "length"
        stream = client.chat.completions.create(
            model=name, messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
        assert chunks[-1].usage == answer.usage
        completed = client.completions.create(model=name, prompt=["Hello there"] * 3, **GREEDY)
        assert [choice.text for choice in completed.choices] == [raw] * 3
        logprobs = client.completions.create(model=name, prompt="Hello there", logprobs=2, echo=True, **GREEDY)
        entries = logprobs.choices[0].logprobs
        assert entries is not None and entries.token_logprobs is not None and entries.token_logprobs[0] is None
        assert logprobs.choices[0].text == "Hello there" + raw
        assert all(value is not None and value <= 0 for value in entries.token_logprobs[1:])
    assert cli("run", "Hello there", "-m", llama, "--temperature", 0, "--max-tokens", 12, "--ignore-eos").out.rstrip(
        "\n"
    ) == expected.rstrip("\n")


def test_many_streams_half_of_which_leave(cli: Any, smollm2_path: Path) -> None:
    """Those that stay get the tokens they would get alone; the others' requests end and health stays quick."""

    async def ask(client: httpx.AsyncClient, url: str, index: int, num_lines: int | None) -> str:
        body = {"prompt": f"Story {index % 4}:", "max_tokens": 24, "temperature": 0, "stream": True, "ignore_eos": True}
        text = ""
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            async for count, line in _enumerate(response.aiter_lines()):
                if count == num_lines:
                    return ""
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def run(url: str) -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=120) as client:
            alone = [await ask(client, url, index, None) for index in range(4)]
            tasks = [asyncio.create_task(ask(client, url, i, 4 if i % 2 else None)) for i in range(64)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert (await client.get(f"{url}/health")).status_code == 200
            assert not all(task.done() for task in tasks)  # they do not hold up others
            return alone, await asyncio.gather(*tasks)

    with cli.serving(smollm2_path, "--enable-server-load-tracking", "--max-model-len", 512) as (url, process):
        alone, together = asyncio.run(run(url))
        assert [text for i, text in enumerate(together) if i % 2 == 0] == [alone[i % 4] for i in range(0, 64, 2)]
        deadline = time.monotonic() + 5
        while httpx.get(f"{url}/load").json() != {"server_load": 0}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


# Parameters that the sampler of the graph would refuse, and with them everybody's step.
POISON: list[dict[str, Any]] = [
    {"allowed_token_ids": [2], "min_tokens": 3, "stop_token_ids": [2]},
    {"stop_token_ids": list(range(384)), "min_tokens": 1},
    {"temperature": 1.0, "top_p": 1e-300},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 1e300},
]


def test_bad_requests_harm_nobody(cli: Any, llama: Path) -> None:
    async def run(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as client:

            async def ask(**fields: Any) -> httpx.Response:
                body = {"prompt": "Hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True, **fields}
                return await client.post(f"{url}/v1/completions", json=body)

            alone = (await ask()).json()["choices"]
            good = [asyncio.create_task(ask()) for _ in range(4)]
            await asyncio.sleep(0.02)
            bad = await asyncio.gather(*(ask(**fields) for fields in POISON))
            assert [response.status_code for response in bad] == [400] * len(POISON)
            assert [response.json()["choices"] for response in await asyncio.gather(*good)] == [alone] * 4
            assert (await client.get(f"{url}/health")).status_code == 200

    with cli.serving(llama) as (url, _):
        asyncio.run(run(url))


@pytest.fixture(scope="session")
def damaged(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with an embedding of NaN for token 300."""
    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(llama, folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    tensor = json.loads(content[8 : 8 + length])["model.embed_tokens.weight"]
    row_bytes = 4 * tensor["shape"][1]
    start = 8 + length + tensor["data_offsets"][0] + 300 * row_bytes
    content[start : start + row_bytes] = struct.pack("<f", math.nan) * tensor["shape"][1]
    file.write_bytes(content)
    return folder


def test_a_request_whose_logits_are_nan_harms_nobody(cli: Any, damaged: Path) -> None:
    """It gets a 500 that says why; the others get the bits they would get alone, though blocks it left are reused."""

    async def run(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as client:

            async def ask(prompt: list[int], **fields: Any) -> httpx.Response:
                body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "logprobs": 3}
                return await client.post(f"{url}/v1/completions", json=body | fields)

            goods = [[5 + i, *range(10, 30)] for i in range(4)]
            bads = [[*range(40 + i, 70), 300] for i in range(4)]
            alone = [(await ask(prompt)).json()["choices"] for prompt in goods]
            for bad in bads:  # one after the other: every free block holds their NaNs sooner or later
                failed = await ask(bad)
                assert failed.status_code == 500, failed.text
                assert "no usable scores" in failed.text and "kv_cache_dtype" in failed.text
            tasks = [asyncio.create_task(ask(prompt)) for pair in zip(goods, bads, strict=True) for prompt in pair]
            answers = await asyncio.gather(*tasks)
            assert [answer.status_code for answer in answers] == [200, 500] * 4
            assert [answer.json()["choices"] for answer in answers[::2]] == alone
            streamed = await ask(bads[0], stream=True)
            assert streamed.status_code == 500 and "no usable scores" in streamed.text
            assert (await client.get(f"{url}/health")).status_code == 200

    options = ("--no-verify", "--num-gpu-blocks-override", 17, "--max-model-len", 128, "--no-enable-prefix-caching")
    with cli.serving(damaged, *options) as (url, _):
        asyncio.run(run(url))


_FAILING_SERVER = """
import os, sys
from trivet.backends.session import ModelSession
run = ModelSession.run
def fail(self, *arguments):
    if os.path.exists(sys.argv[-1]):
        raise RuntimeError("injected")
    return run(self, *arguments)
ModelSession.run = fail
from trivet.app.cli import main
sys.exit(main(sys.argv[1:-1]))
"""


def test_a_dead_engine_fails_its_requests_and_ends_the_server(cli: Any, llama: Path, tmp_path: Path) -> None:
    switch = tmp_path / "fail"
    command = [sys.executable, "-c", _FAILING_SERVER, "serve", str(llama), "--port", "0", str(switch)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=cli.environment)
    assert process.stderr is not None
    try:
        url = next(line for line in process.stderr if line.startswith("Serving ")).split(" on ")[1].split()[0]
        body = {"prompt": "Hello", "max_tokens": 900, "stream": True, "ignore_eos": True}
        errors: list[dict[str, Any]] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
            for line in response.iter_lines():
                if not switch.exists():
                    switch.touch()
                if '"error"' in line:
                    errors.append(json.loads(line[6:])["error"])
        assert errors[0]["code"] == 503 and "injected" in errors[0]["message"]
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
        assert process.wait(20) == 1
        assert "injected" in process.stderr.read().splitlines()[-1]
    finally:
        process.kill()
        process.communicate()


async def _enumerate(lines: Any) -> Any:
    count = 0
    async for line in lines:
        yield count, line
        count += 1


def test_sigterm_completes_the_answers_in_progress(cli: Any, llama: Path) -> None:
    with cli.serving(llama) as (url, process):
        body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        usages: list[dict[str, int]] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    if not usages:
                        process.send_signal(signal.SIGTERM)
                    usages.append(json.loads(line[6:])["usage"])
        assert usages[-1]["completion_tokens"] == 200
        assert process.wait(20) == 0


def test_interrupt_without_answers_in_progress_has_nothing_to_wait_for(cli: Any, llama: Path) -> None:
    with cli.serving(llama) as (url, process):
        assert httpx.get(f"{url}/health").status_code == 200
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0 and "Completing" not in log


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_cuts_the_answers_off(cli: Any, smollm2_path: Path, number: int, stream: bool) -> None:
    """Status 130, at once, and nothing in the log that looks like a defect."""
    options = ("--max-model-len", 8192, "--enable-server-load-tracking")
    with cli.serving(smollm2_path, *options) as (url, process):
        body = {"prompt": "Hello", "max_tokens": 8000, "stream": stream, "ignore_eos": True}
        errors: list[Exception] = []

        def ask() -> None:
            try:
                httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            except httpx.TransportError as error:
                errors.append(error)

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        while httpx.get(f"{url}/load").json() != {"server_load": 3}:
            time.sleep(0.05)
        process.send_signal(number)
        time.sleep(1.0)
        assert process.poll() is None  # 8000 tokens take minutes
        process.send_signal(number)
        _, log = process.communicate(timeout=30)
        for client in clients:
            client.join(10)
    assert len(errors) == 3
    assert process.returncode == 130
    assert "Traceback" not in log and "ERROR" not in log, log
    again = "^C" if number == signal.SIGINT else "SIGTERM"
    assert log.count(f"Completing 3 answers; a second {again} cuts them off\n") == 1, log


def test_port_in_use_is_said_before_the_model_loads(cli: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = cli("serve", "no-such-model", "--port", port)
    assert result.status == 1 and result.err.count("\n") == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in result.err


def test_unknown_model_frees_the_port(cli: Any) -> None:
    result = cli("serve", "no-such-model", "--port", 0)
    assert result.status == 3 and "no model 'no-such-model'" in result.err and result.err.count("\n") == 1


def test_interrupt_while_the_server_loads(cli: Any, smollm2_path: Path, tmp_path: Path) -> None:
    environment = {**cli.environment, "TRIVET_HOME": str(tmp_path)}
    process = cli.start("serve", smollm2_path, "--port", 0, env=environment)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    # CPython ends itself by the signal, the same to a shell, if that fell into an exec() (a dataclass being made)
    assert process.returncode in (0, 130, -signal.SIGINT) and "Traceback" not in err


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}])
def test_key_from_the_environment(cli: Any, llama: Path, header: dict[str, str]) -> None:
    with cli.serving(llama, TRIVET_API_KEY="secret") as (url, _):
        assert httpx.get(f"{url}/v1/models", headers=header).status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
