"""run, chat and complete: in this process and against servers; ^C at every stage."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

GREEDY = ("--temperature", 0, "--max-tokens", 12, "--ignore-eos")


# --- run ----------------------------------------------------------------------------------------------------------
def test_run_streams_the_answer_of_the_python_api(cli: Any, llama: Path) -> None:
    from trivet import LLM, SamplingParams

    result = cli("run", "Hello there", "-m", llama, *GREEDY)
    assert result.status == 0, result.err
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(llama)) as llm:
        expected = llm.chat([{"role": "user", "content": "Hello there"}], params)[0].outputs[0].text
        raw = llm.generate("Hello there", params)[0].outputs[0].text
    assert result.out.rstrip("\n") == expected.rstrip("\n")
    assert cli("run", "Hello there", "-m", llama, "--raw", *GREEDY).out.rstrip("\n") == raw.rstrip("\n")
    assert raw != expected


def test_run_reads_a_pipe(cli: Any, llama: Path) -> None:
    piped = cli("run", "-m", llama, *GREEDY, stdin="Hello there")
    assert piped.out == cli("run", "Hello there", "-m", llama, *GREEDY).out
    both = cli("run", "Say", "-m", llama, *GREEDY, "--json", stdin="this").json()
    assert both["text"] == cli("run", "Say\n\nthis", "-m", llama, *GREEDY, "--json").json()["text"]


def test_run_system_and_seed(cli: Any, llama: Path) -> None:
    plain = cli("run", "Hello", "-m", llama, *GREEDY, "--json").json()
    system = cli("run", "Hello", "-m", llama, *GREEDY, "--json", "--system", "Be brief").json()
    assert system["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    first, second = (cli("run", "Hello", "-m", llama, "--max-tokens", 12, "--seed", 7).out for _ in range(2))
    assert first == second


def test_run_without_a_chat_template(cli: Any, base_model: Path) -> None:
    result = cli("run", "Hello", "-m", base_model, *GREEDY)
    assert result.status == 0 and "has no chat template: the prompt is continued as it is" in result.err
    assert result.out == cli("run", "Hello", "-m", base_model, "--raw", *GREEDY).out
    result = cli("run", "Hello", "-m", base_model, "--system", "x")
    assert result.status == 2 and "--system needs a chat template" in result.err


def test_run_refuses_bad_input(cli: Any, llama: Path) -> None:
    result = cli("run", "x " * 3000, "-m", llama)
    assert result.status == 2 and "max_model_len" in result.err.splitlines()[-1]
    assert result.err.count("trivet: error: ") == 1
    process = cli.start("run", "-m", llama, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.buffer.write(b"\xff\xfe")
    _, err = process.communicate()
    assert process.returncode == 2 and "stdin is not valid UTF-8" in err


# --- ^C -----------------------------------------------------------------------------------------------------------
def interrupt(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err, err
    return err


@pytest.mark.parametrize("seconds", [0.15, 0.4, 0.8, 1.2])
def test_interrupt_while_loading(cli: Any, smollm2_path: Path, tmp_path: Path, seconds: float) -> None:
    """An own cache: start, export and load, wherever the signal falls."""
    environment = {**cli.environment, "TRIVET_HOME": str(tmp_path)}
    process = cli.start("run", "x", "-m", smollm2_path, "--ignore-eos", env=environment)
    time.sleep(seconds)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    # a signal before Python has its handlers ends the process at once
    assert process.returncode in (130, -signal.SIGINT) and (seconds < 0.2 or "Traceback" not in err), err
    assert not [
        path
        for path in tmp_path.glob("packages/*")
        if not path.name.startswith(".") and not list(path.glob("trivet.json"))
    ]


_INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "argparse":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["trivet", "--version"]
from runpy import run_module
run_module(sys.argv.pop(), run_name="__main__")
"""


@pytest.mark.parametrize("module", ["trivet", "trivet.app"])
def test_interrupt_while_the_command_line_is_imported(cli: Any, module: str) -> None:
    code = _INTERRUPTED_IMPORT.replace('"--version"]', f'"--version", "{module}"]')
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=cli.environment, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


_TELLS_ITS_STEPS = """
import sys
from trivet.backends.session import ModelSession
run = ModelSession.run
def tell(self, inputs, outputs):
    print("step of", len(inputs["input_ids"]), "tokens", file=sys.stderr, flush=True)
    results = run(self, inputs, outputs)
    print("step done", file=sys.stderr, flush=True)
    return results
ModelSession.run = tell
from trivet.app.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("step", [512, 7168])
def test_interrupt_during_prefill(step: int, cli: Any, smollm2_path: Path) -> None:
    """^C does not wait for the prompt, nor for the step that runs, however slow the machine is."""
    assert cli("export", smollm2_path).status == 0
    prompt = "word " * 7200
    command = [sys.executable, "-c", _TELLS_ITS_STEPS, "run", prompt, "-m", str(smollm2_path)]
    command += ["--max-num-batched-tokens", str(step)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=cli.environment,
    )  # fmt: skip
    assert process.stderr is not None
    steps = [next(line for line in process.stderr if line.startswith("step of "))]
    err = interrupt(process)
    steps += [line for line in err.splitlines(keepends=True) if line.startswith("step of ")]
    assert set(steps) == {f"step of {step} tokens\n"}, steps
    assert len(steps) <= 3  # of 14; the one that ran, and those that began before the signal had arrived
    assert err.count("step done") < len(steps)


_TAKES_THE_SIGNAL_IN_ANOTHER_THREAD = """
import signal, threading
def take(self, inputs, outputs):
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    assert threading.current_thread() is not threading.main_thread()
    ModelSession.run = tell
    return tell(self, inputs, outputs)
ModelSession.run = take
from trivet.app.cli import main
"""


def test_interrupt_that_another_thread_is_given(cli: Any, smollm2_path: Path) -> None:
    """The main thread waits for the first token; the system wakes it only for a signal that it takes itself."""
    assert cli("export", smollm2_path).status == 0
    code = _TELLS_ITS_STEPS.replace("from trivet.app.cli import main\n", _TAKES_THE_SIGNAL_IN_ANOTHER_THREAD)
    command = [sys.executable, "-c", code, "run", "word " * 2000, "-m", str(smollm2_path)]
    command += ["--max-num-batched-tokens", "128"]
    done = subprocess.run(command, capture_output=True, text=True, env=cli.environment, timeout=60, check=False)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert 1 <= done.stderr.count("step of 128 tokens") <= 3, done.stderr  # of 15


def test_interrupt_during_decode(cli: Any, smollm2_path: Path) -> None:
    process = cli.start("run", "Count to a thousand.", "-m", smollm2_path, "--ignore-eos")
    assert process.stdout is not None
    assert process.stdout.read(5)
    interrupt(process)


# --- chat ---------------------------------------------------------------------------------------------------------
def spawn(cli: Any, *arguments: Any, **environment: str) -> Any:
    pexpect = pytest.importorskip("pexpect", reason="pexpect stands for a terminal")
    words = ["-m", "trivet", *map(str, arguments)]
    env = cli.environment | {"NO_COLOR": "1", "TERM": "dumb"} | environment
    return pexpect.spawn(sys.executable, words, env=env, encoding="utf-8", timeout=30, echo=False)


def test_chat_on_a_terminal(cli: Any, llama: Path) -> None:
    child = spawn(cli, "chat", "-m", llama, *GREEDY, "--stats")
    child.expect_exact(f"{llama.name}: ^C stops an answer, ^D ends the chat, /help lists commands")
    child.expect_exact("> ")
    child.sendline("Hello")
    child.expect(r"\[TTFT \d+ ms, ([\d.]+ tokens/s|all at once), 12 tokens\]")
    child.expect_exact("> ")
    child.sendeof()
    child.wait()
    assert child.exitstatus == 0


def test_interrupt_stops_an_answer_then_the_chat(cli: Any, smollm2_path: Path) -> None:
    child = spawn(cli, "chat", "-m", smollm2_path, "--ignore-eos")
    child.expect_exact("> ")
    child.sendline("Count to a thousand.")
    child.expect(r"\w+")
    child.sendintr()
    child.expect_exact("(stopped; the question is forgotten)")
    child.expect_exact("> ")
    child.sendintr()
    child.wait()
    assert child.exitstatus == 0


def test_chat_keeps_the_history(cli: Any, llama: Path) -> None:
    piped = cli("chat", "-m", llama, *GREEDY, stdin="Hello\nAgain\n")
    assert piped.status == 0, piped.err
    alone = cli("chat", "-m", llama, *GREEDY, stdin="Again\n")
    assert piped.out.startswith(cli("chat", "-m", llama, *GREEDY, "-q", "Hello").out)
    assert not piped.out.endswith(alone.out)


def test_chat_without_a_template(cli: Any, base_model: Path) -> None:
    result = cli("chat", "-m", base_model, "-q", "x")
    assert result.status == 2 and "use `trivet complete`" in result.err


def test_chat_goes_on_after_a_question_that_is_too_long(cli: Any, llama: Path) -> None:
    result = cli("chat", "-m", llama, *GREEDY, stdin="x " * 3000 + "\nHello\n")
    assert result.status == 0 and "max_model_len" in result.err
    assert result.out == cli("chat", "-m", llama, *GREEDY, stdin="Hello\n").out


def test_complete(cli: Any, llama: Path) -> None:
    raw = cli("run", "Hello", "-m", llama, "--raw", *GREEDY).out
    assert cli("complete", "Hello", "-m", llama, *GREEDY).out == raw
    assert cli("complete", "-m", llama, *GREEDY, stdin="Hello\nHello\n").out == raw * 2


# --- against servers ----------------------------------------------------------------------------------------------
class FakeServer(BaseHTTPRequestHandler):
    """An OpenAI-compatible server of somebody else; remembers bodies and keys."""

    seen: list[tuple[str, dict[str, Any], str | None]]

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body, self.headers.get("Authorization")))
        self.send_response(200)
        self.end_headers()
        text = {"text": "4"} if self.path.endswith("/v1/completions") else {"delta": {"content": "4"}}
        events: list[dict[str, Any]] = [{"choices": [{"index": 0, **text, "finish_reason": None}]} for _ in range(2)]
        events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def other_server() -> Iterator[tuple[str, list[Any]]]:
    handler = type("Handler", (FakeServer,), {"seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", handler.seen  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


def test_chat_with_another_server(cli: Any, other_server: tuple[str, list[Any]]) -> None:
    url, seen = other_server
    result = cli("chat", "--url", url, "--system-prompt", "Be brief", "--top-k", 3, "--stats", stdin="2+2?\nSure?\n",
                 OPENAI_API_KEY="")  # fmt: skip
    assert (
        result.status == 0 and result.out == "44\n44\n" and "Using model: first" in result.err and "TTFT" in result.err
    )
    path, body, authorization = seen[1]
    assert path == "/v1/chat/completions" and authorization == "Bearer EMPTY" and body["model"] == "first"
    assert body["top_k"] == 3 and body["stream"] is True
    assert [m["content"] for m in body["messages"]] == ["Be brief", "2+2?", "44", "Sure?"]
    cli("chat", "--url", url, "-q", "x", "--model-name", "second", OPENAI_API_KEY="from-environment")
    assert seen[2][1]["model"] == "second" and seen[2][2] == "Bearer from-environment"
    cli("chat", "--url", url, "-q", "x", "--api-key", "given", OPENAI_API_KEY="from-environment")
    assert seen[3][2] == "Bearer given"


def test_chat_commands_never_reach_the_model(cli: Any, other_server: tuple[str, list[Any]]) -> None:
    url, seen = other_server
    child = spawn(cli, "chat", "--url", url, "--system-prompt", "Be brief")
    for line, answer in [
        ("/help", "/clear  begin anew: forget what was said"),
        ("/hlep me", "error: unknown command /hlep me; did you mean /help?; /help lists them; a line for the model"),
        ("Hello", "44"),
        (" /help is what?", "44"),
        ("/clear", "(forgotten)"),
        ("Again", "44"),
    ]:
        child.expect_exact("> ")
        child.sendline(line)
        child.expect_exact(answer)
    child.expect_exact("> ")
    child.sendline("/exit")
    child.wait()
    assert child.exitstatus == 0
    contents = [[message["content"] for message in body["messages"]] for _, body, _ in seen]
    assert contents == [
        ["Be brief", "Hello"],
        ["Be brief", "Hello", "44", "/help is what?"],
        ["Be brief", "Again"],
    ]


def test_chat_commands_may_be_piped_in(cli: Any, other_server: tuple[str, list[Any]]) -> None:
    url, seen = other_server
    lines = ("Hello", "/help", "/clear", "/hlep me", " /etc is what?", "/exit", "never asked")
    result = cli("chat", "--url", url, stdin="\n".join(lines))
    assert (result.status, result.out) == (0, "44\n44\n")
    contents = [[message["content"] for message in body["messages"]] for _, body, _ in seen]
    assert contents == [["Hello"], ["/etc is what?"]]
    assert "/clear  begin anew: forget what was said" in result.err and "(forgotten)" in result.err
    assert "error: unknown command /hlep me; did you mean /help?" in result.err
    assert "typed or piped in" in " ".join(cli("chat", "--help").out.split())


def test_chat_takes_a_paste_of_several_lines_as_one_text(cli: Any, other_server: tuple[str, list[Any]]) -> None:
    pytest.importorskip("readline", reason="pastes are taken apart by readline")
    url, seen = other_server
    child = spawn(cli, "chat", "--url", url, TERM="xterm")
    for text in ("/* one\ntwo */\n", "three"):
        child.expect_exact("> ")
        child.sendline(f"\x1b[200~{text}\x1b[201~")
        child.expect_exact("44")
    child.expect_exact("> ")
    child.sendeof()
    child.wait()
    assert child.exitstatus == 0
    assert [body["messages"][-1]["content"].strip() for _, body, _ in seen] == ["/* one\ntwo */", "three"]


def test_chat_on_a_terminal_without_readline(cli: Any, other_server: tuple[str, list[Any]], tmp_path: Path) -> None:
    """As in an archive, which leaves it out."""
    url, seen = other_server
    (tmp_path / "readline.py").write_text("raise ModuleNotFoundError(\"No module named 'readline'\")")
    child = spawn(cli, "chat", "--url", url, PYTHONPATH=str(tmp_path))
    child.expect_exact("> ")
    child.sendline("Hello")
    child.expect_exact("44")
    child.expect_exact("> ")
    child.sendeof()
    child.wait()
    assert child.exitstatus == 0 and len(seen) == 1


def test_complete_with_another_server(cli: Any, other_server: tuple[str, list[Any]]) -> None:
    url, seen = other_server
    assert cli("complete", "--url", url, "1+1=", "--max-tokens", 3, "--seed", 5).out == "44\n"
    assert seen[0][0] == "/v1/completions"
    assert (seen[0][1]["prompt"], seen[0][1]["max_tokens"], seen[0][1]["seed"]) == ("1+1=", 3, 5)


def test_chat_with_our_server(cli: Any, llama: Path) -> None:
    with cli.serving(llama, "--api-key", "secret", "--served-model-name", "mine") as (url, _):
        result = cli("chat", "--url", f"{url}/v1", "--api-key", "secret", *GREEDY, stdin="Hello\nAgain\n")
        assert result.status == 0 and "Using model: mine" in result.err
        assert result.out == cli("chat", "-m", llama, *GREEDY, stdin="Hello\nAgain\n").out
        refused = cli("chat", "--url", f"{url}/v1", "-q", "x", OPENAI_API_KEY="")
        assert refused.status == 1 and "answered 401" in refused.err and "--api-key" in refused.err
        lost = cli("chat", "--url", f"{url}/api", "--api-key", "secret", "-q", "x")
        assert lost.status == 1 and "answered 404: there is nothing at this path" in lost.err
        assert f"(most servers want --url {url}/v1)" in lost.err
        expected = cli("complete", "Hello", "-m", llama, *GREEDY).out
        for same in (f"{url}/v1", url, f"{url}/"):  # without a path as `trivet serve` says it
            completed = cli("complete", "--url", same, "--api-key", "secret", "Hello", *GREEDY)
            assert completed.out == expected, completed.err
