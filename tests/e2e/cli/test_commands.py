"""The command line itself: help, flags, exit codes, streams; and the commands that are no conversation."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("onnxruntime", "onnx", "numpy", "tokenizers", "jinja2", "fastapi", "pydantic", "huggingface_hub", "rich")
COMMANDS = ("run", "chat", "complete", "serve", "pull", "list", "show", "rm", "export", "doctor")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list", "--help"], ["pull", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, trivet.app.cli as c\ntry: c.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]" and done.stdout


def test_version_and_ways_to_start(cli: Any) -> None:
    from trivet import __version__

    assert cli("--version").out == f"trivet {__version__}\n"
    done = subprocess.run([sys.executable, "-m", "trivet.app", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"trivet {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(cli: Any, command: str) -> None:
    result = cli(command, "--help")
    assert result.status == 0 and result.out.startswith(f"usage: trivet {command} [FLAGS]") and result.err == ""
    assert f"  {command}" in cli("--help").out


def test_help_names_a_command_s_own_default(cli: Any) -> None:
    texts = [" ".join(cli("bench", kind, "--help").out.split()) for kind in ("latency", "throughput")]
    assert [text.split("Reuse the KV blocks of equal prompt prefixes (default: ")[1][:3] for text in texts] == [
        "off",
        "on)",
    ]


def test_help_is_a_command_too(cli: Any) -> None:
    assert cli("help").out == cli("--help").out
    assert cli("help", "run").out == cli("run", "--help").out
    assert "unknown command 'rnu'" in cli("help", "rnu").err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["rnu"], 2, "unknown command 'rnu'; did you mean run?"),
        (["run", "--temprature", "1", "x"], 2, "unknown flag --temprature; did you mean --temperature?"),
        (["run", "--max-model-le", "1", "x"], 2, "did you mean --max-model-len?"),
        (["run", "--max-model-len", "many", "x"], 2, "many"),
        (["run", "--temp", "1", "x"], 2, "unknown flag --temp"),
        (["run", "--quantization", "awq", "x"], 2, "--quantization is not supported: the weights run in the format"),
        (["run", "a", "b"], 2, "unexpected argument 'b'"),
        (["run"], 2, "the prompt is empty"),
        (["run", ""], 2, "the prompt is empty"),
        (["run", "x", "--temperature", "9"], 2, "temperature must be in [0, 2]"),
        (["run", "x", "--temperature", "nan"], 2, "temperature must be a finite number"),
        (["run", "x", "--max-tokens", "0"], 2, "max_tokens must be at least 1"),
        (["run", "x", "--raw", "--system", "y"], 2, "--raw"),
        (["run", "x", "--chat-template-kwargs", "[]"], 2, "expected a JSON object"),
        (["run", "x", "-m", "nope"], 3, "no model 'nope'"),
        (["run", "x", "-m", "SmolLM2"], 3, "Did you mean 'smollm2'?"),
        (
            ["pull", "SMOLLM2"],
            3,
            "'SMOLLM2' is nothing to pull. Did you mean 'smollm2'? Expected a name",
        ),
        (["show", "Smollm2"], 3, "Did you mean 'smollm2'?"),
        (["run", "--url", "http://127.0.0.1:9", "x"], 2, "unknown flag --url; did you mean `trivet chat --url URL`?"),
        (["run", "x", "--url=http://127.0.0.1:9"], 2, "did you mean `trivet chat --url URL`?"),
        (["serve", "--url", "x"], 2, "unknown flag --url; --host and --port say where `trivet serve` listens (see"),
        (["chat", "--host", "x"], 2, "unknown flag --host; did you mean `--url http://HOST:PORT`?"),
        (["complete", "x", "--port=1"], 2, "unknown flag --port; did you mean `--url http://HOST:PORT`?"),
        (["run", "x", "--host", "y"], 2, "unknown flag --host; did you mean `trivet chat --url http://HOST:PORT`?"),
        (["show", "--jsno", "x"], 2, "unknown flag --jsno; did you mean --json?"),
        (["serve", "--uri", "x"], 2, "unknown flag --uri (see"),
        (
            ["chat", "--url", "localhost:8000"],
            1,
            "'localhost:8000' is not a server's URL: it has no scheme; did you mean http://localhost:8000/v1?",
        ),
        (["chat", "--url", "box/llm/v1"], 1, "it has no scheme; did you mean http://box/llm/v1?"),
        (
            ["chat", "--url", "ftp://box"],
            1,
            "'ftp://box' is not a server's URL; expected one like http://localhost:8000/v1",
        ),
        (["run", "x", "-m", "./nope.gguf"], 3, "there is no file or folder"),
        (["run", "x", "--tensor-parallel-size", "2"], 2, "tensor_parallel_size"),
        (["chat", "--url", "http://127.0.0.1:9/v1", "-m", "x"], 2, "--model is for a model in this process"),
        (["chat", "--api-key", "x"], 2, "give --url too"),
        (["chat", "--url", "http://127.0.0.1:9/v1"], 1, "no server answers at http://127.0.0.1:9/v1"),
        (["chat", "--url", "http://127.0.0.1:9"], 1, "no server answers at http://127.0.0.1:9/v1"),
        (["chat", "--url", "http://127.0.0.1:9/llm/"], 1, "no server answers at http://127.0.0.1:9/llm ("),
        (["chat", "--url", "nonsense"], 1, "is not a server's URL"),
        (["chat", "--url", "http://[::1"], 1, "is not a server's URL: Invalid IPv6 URL"),
        (["chat", "--url", "http://local host:8000"], 1, "is not a server's URL"),
        (["chat", "--url", "http://localhost:8000?key=1"], 1, "has a query or a fragment"),
        (["chat", "--url", "http://localhost:73536"], 1, "has no valid port (Port out of range 0-65535)"),
        (["chat", "--url", "http://me:secret@localhost:8000"], 1, "has a user name; expected one without"),
        (["serve", "a", "--model", "b"], 2, "give one of them"),
        (["serve", "--ssl-keyfile", "x"], 2, "go together"),
        (["serve", "--ssl-ca-certs", "no-such.pem"], 2, "--ssl-ca-certs: there is no file no-such.pem"),
        (["serve", "--ssl-cert-reqs", "2"], 2, "need --ssl-keyfile and --ssl-certfile: this would be http"),
        (["serve", "--api-key", ""], 2, "--api-key is empty"),
        (["serve", "--allow-credentials"], 2, "--allow-credentials needs --allowed-origins"),
        (["serve", "--port", "99999"], 2, "0 to 65535"),
        (["serve", "--host", ""], 2, "--host is empty"),
        (["serve", "--served-model-name", "a", ""], 2, "--served-model-name is empty"),
        (["serve", "--default-chat-template-kwargs", '{"messages": 1}'], 2, "the conversation's own: messages"),
        (["run", "x", "--chat-template-kwargs", '{"messages": 1}'], 2, "the conversation's own: messages"),
        (["chat", "--chat-template-kwargs.tokenize", "true"], 2, "the conversation's own: tokenize"),
        (["run", "a \udcff b"], 2, "argument PROMPT: not valid UTF-8: 'a \\udcff b'"),
        (["chat", "-q", "\udcff"], 2, "not valid UTF-8"),
        (["complete", "\udcff"], 2, "not valid UTF-8"),
        (["run", "x", "--system", "\udcff"], 2, "not valid UTF-8"),
        (["run", "x", "--stop", "\udcff"], 2, "not valid UTF-8"),
        (["chat", "--url", "", "-q", "x"], 1, "'' is not a server's URL; expected one like"),
        (["serve", "--chat-template", "no-such-file"], 2, "neither a readable file nor a template"),
        (["show", "smollm2"], 3, "`trivet pull smollm2` fetches it"),
        (["rm", "nope"], 3, "no model 'nope' in the cache"),
        (["pull", "name"], 3, "Expected a name of the catalogue (smollm2), pypi:NAME"),
        (["run", "x", "--config", "no-such.yaml"], 2, "no-such.yaml: No such file"),
    ],
)
def test_errors_are_one_line(cli: Any, arguments: list[str], status: int, says: str) -> None:
    result = cli(*arguments)
    assert (result.status, result.out) == (status, "")
    assert says in result.err and result.err.startswith("trivet: error: ") and result.err.count("\n") == 1


def test_debug_shows_the_traceback(cli: Any) -> None:
    result = cli("run", "x", "-m", "nope", TRIVET_DEBUG="1")
    assert "Traceback" in result.err and result.err.endswith("REPO[:QUANT]\n") and result.status == 3


def test_config_file(cli: Any, llama: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {llama}\nmax_tokens: 5\nmax-model-len: 1k\njson: true\nstop: [zzz, yyy]\ntemperature: 0\n"
    )
    answer = cli("run", "hello", "--config", config, "--ignore-eos")
    assert answer.status == 0, answer.err
    assert answer.json()["usage"]["completion_tokens"] == 5
    answer = cli("run", "--config", config, "--max-tokens", 3, "hello", "--ignore-eos")  # the command line wins
    assert answer.json()["usage"]["completion_tokens"] == 3
    config.write_text(f"model: {llama}\njson: true\noverride-generation-config: {{max_new_tokens: 4}}\n")
    assert cli("run", "hello", "--config", config, "--ignore-eos").json()["usage"]["completion_tokens"] == 4
    for text, says in (
        ("max_tokns: 1", "'max_tokns' is no flag of `trivet run`; did you mean --max-tokens?"),
        ("- 1", "expected a mapping"),
        ("a: [", "is not YAML"),
        ("json: 3", "is a switch"),
        ("max_tokens: true", "takes a value"),
        ("max_tokens: null", "unusable value"),
    ):
        config.write_text(text)
        result = cli("run", "hello", "--config", config)
        assert result.status == 2 and says in result.err and result.err.count("\n") == 1


def test_broken_pipe_is_quiet(cli: Any, llama: Path) -> None:
    process = cli.start("run", "x", "-m", llama, "--ignore-eos", "--max-tokens", 400)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "rror" not in process.stderr.read() and process.wait(60) == 141


@pytest.mark.parametrize(
    ("closed", "status", "says"),
    [
        ("<&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- 2>&-", 0, ""),
        (">&-", 1, "cannot write to stdout: Bad file descriptor"),
        ("<&- >&- 2>&-", 1, ""),
        (">/dev/full", 1, "cannot write to stdout: No space left on device"),
    ],
)
def test_closed_and_full_standard_streams(cli: Any, llama: Path, closed: str, status: int, says: str) -> None:
    command = [sys.executable, "-m", "trivet", "run", "x", "-m", str(llama), "--max-tokens", "2"]
    shell = f"{shlex.join(command)} {closed}"
    done = subprocess.run(
        shell, shell=True, env=cli.environment, capture_output=True, timeout=60, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == status
    lines = [line for line in done.stderr.decode().splitlines() if line != "preparing the model, once"]
    assert lines == ([f"trivet: error: {says}"] if says else [])


def test_no_colours_without_a_terminal(cli: Any) -> None:
    assert "\x1b" not in cli("run", "x", "-m", "nope").err


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_on_a_terminal(cli: Any, no_color: str, coloured: bool) -> None:
    pexpect = pytest.importorskip("pexpect", reason="pexpect stands for a terminal")
    environment = {**cli.environment, "NO_COLOR": no_color, "TERM": "xterm"}
    output = pexpect.run(f"{sys.executable} -m trivet run x -m nope", env=environment).decode()
    assert ("\x1b[31merror:" in output) == coloured and "no model 'nope'" in output


def test_export_and_show(cli: Any, llama: Path, tmp_path: Path) -> None:
    result = cli("export", llama, "--out", tmp_path / "package", "--json")
    assert result.status == 0, result.err
    facts = result.json()
    assert facts["family"] == "llama" and facts["verified"] and Path(facts["package"]) == tmp_path / "package"
    shown = cli("show", tmp_path / "package", "--json").json()
    assert shown["family"] == "llama" and shown["num_hidden_layers"] == 3 and shown["chat_template"]
    assert "llama" in cli("show", llama).out
    unverified = cli("export", llama, "--out", tmp_path / "other", "--no-verify", "--json").json()
    assert unverified["verified"] is False
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF\x03\x00\x00\x00")
    result = cli("export", damaged)
    assert result.status == 1 and result.err.startswith("trivet: error: ") and result.err.count("\n") == 1


def test_doctor(cli: Any, llama: Path) -> None:
    report = cli("doctor", "--model", llama, "--max-model-len", 512, "--json").json()
    assert report["problems"] == [] and report["cpu"]["selected_tier"] in report["cpu"]["tiers"]
    assert report["telemetry"] == {"trivet": "none", "onnxruntime": "off", "huggingface_hub": "off"}
    assert report["model"]["max_model_len"] == 512 and report["model"]["kv_cache_bytes"] > 0
    assert report["model"]["kv_cache_dtype"] == "float32"  # as the checkpoint is
    assert "(`trivet doctor -m MODEL` says which)" in " ".join(cli("run", "--help").out.split())
    assert report["folders"]["home"]["path"] == str(cli.home)
    assert report["ops"]["loaded_by_onnxruntime"] == report["versions"]["onnxruntime"]
    assert report["environment"]["TRIVET_HOME"] == str(cli.home)
    text = cli("doctor", TRIVET_API_KEY="geheim", HF_TOKEN="geheim").out
    assert text.endswith("problem: none\n") and "geheim" not in text and "environment.HF_TOKEN" in text


def test_doctor_names_the_variable_of_a_tier_that_is_none(cli: Any, llama: Path) -> None:
    wrong = {"TRIVET_CPU_TIER": "nonsense"}
    result = cli("doctor", "--json", **wrong)
    asked = cli("run", "x", "-m", llama, **wrong)
    assert result.status == 1 and asked.status == 1
    assert asked.err == f"trivet: error: {result.json()['problems'][0]}\n"
    assert len(result.json()["problems"]) == 1 and result.json()["ops"] is not None
    (problem,) = cli("doctor", "--json", "--cpu-tier", "nonsense").json()["problems"]
    assert problem.startswith("unknown CPU tier 'nonsense', known: ")
    assert cli("doctor", "--json", "--cpu-tier", "baseline", **wrong).json()["problems"] == []


def test_doctor_reports_problems(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    result = cli("doctor", "--model", "nope", "--json", TRIVET_HOME=str(file))
    assert result.status == 1
    problems = " ".join(result.json()["problems"])
    assert "cannot be written" in problems and "no model 'nope'" in problems


def test_removing_a_model_removes_its_packages(
    cli: Any, smollm2_path: Path, llama: Path, trivet_home: Path, tmp_path: Path
) -> None:
    from trivet.runtime.model_store.store import Record, StoredFile, install

    staged = trivet_home / "models" / "staged"
    staged.mkdir(parents=True)
    shutil.copy(smollm2_path, staged / "m.gguf")
    files = [StoredFile(name="m.gguf", size_bytes=smollm2_path.stat().st_size, sha256=None)]
    record = Record(
        name="mine", reference="pypi:mine==1", revision="1", entry="m.gguf", files=files, license=None,
        pulled_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    install(staged, record)
    for model in ("mine", llama):
        assert cli("export", model, "--no-verify", TRIVET_HOME=str(trivet_home)).status == 0
    packages = trivet_home / "packages"
    assert len(list(packages.glob("*/trivet.json"))) == 2
    assert cli("rm", "mine", TRIVET_HOME=str(trivet_home)).status == 0
    assert len(list(packages.glob("*/trivet.json"))) == 1 and llama.is_dir()


def test_exports_that_are_of_no_use_are_shown_and_removed_when_asked_to(cli: Any, llama: Path, tmp_path: Path) -> None:
    environment = {"TRIVET_HOME": str(tmp_path / "home")}
    copies = {name: shutil.copytree(llama, tmp_path / name) for name in ("kept", "gone", "changed", "older")}
    paths = {}
    for name, copy in copies.items():
        paths[name] = Path(cli("export", copy, "--no-verify", **environment).out.strip())
    os.utime(copies["kept"] / "model.safetensors", (1, 1))  # the same bytes
    shutil.rmtree(copies["gone"])
    with (copies["changed"] / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    manifest = paths["older"] / "trivet.json"
    manifest.write_text(re.sub(r'"trivet_version": "[^"]*"', '"trivet_version": "0.0.1"', manifest.read_text()))
    listed = {Path(export["path"]): export for export in cli("list", "--exports", "--json", **environment).json()}
    problems = {name: listed[path]["problem"] for name, path in paths.items()}
    assert problems == {
        "kept": None,
        "gone": "its checkpoint is gone",
        "changed": "its checkpoint has changed",
        "older": "made by trivet 0.0.1",
    }
    assert listed[paths["gone"]]["checkpoint"] == str(copies["gone"]) and listed[paths["gone"]]["size_bytes"] > 1000
    table = cli("list", "--exports", **environment).out
    assert paths["kept"].name in table and "its checkpoint is gone" in table
    assert "3 exported packages are of no use any more" in cli("list", **environment).err
    removed = cli("rm", "--unused-exports", **environment)
    assert removed.status == 0 and removed.err.count("removed ") == 3, removed.err
    assert {name: path.exists() for name, path in paths.items()} == dict.fromkeys(paths, False) | {"kept": True}
    assert "every exported package is good" in cli("rm", "--unused-exports", **environment).err
    shutil.rmtree(copies["kept"])
    assert "1 exported package is of no use any more" in cli("list", **environment).err
    assert cli("rm", **environment).status == 2


def test_list_of_an_empty_cache(cli: Any, tmp_path: Path) -> None:
    result = cli("list", TRIVET_HOME=str(tmp_path))
    assert (result.status, result.out) == (0, "") and "trivet pull" in result.err
    assert cli("list", "--json", TRIVET_HOME=str(tmp_path)).json() == []
    assert os.listdir(tmp_path) == []
