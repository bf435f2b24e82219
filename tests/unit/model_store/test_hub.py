"""hf: models, through huggingface_hub, from a hub on loopback."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

GGUF = b"GGUF" + os.urandom(2000)
QUANTS = {"m-Q4_0.gguf": GGUF + b"4", "m-Q8_0.gguf": GGUF + b"8", "README.md": b"hi"}
CHECKPOINT = {
    "README.md": b"hi",
    "model-00001-of-00002.safetensors": b"one" * 100,
    "model-00002-of-00002.safetensors": b"two" * 100,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "unused.safetensors": b"x",
    "pytorch_model.bin": b"x",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "config.json": b"{}",
}


def fetched(remote: Any) -> list[str]:
    """Files in the order in which their contents were fetched."""
    return [path.split("/")[-1] for method, path, _ in remote.requests if method == "GET" and "/resolve/" in path]


def test_quant(cli: Any, remote: Any) -> None:
    remote.repositories["org/repo"] = QUANTS
    status, out, err = cli("pull", "hf:org/repo:q8_0", "--json")
    assert status == 0, err
    model = json.loads(out)
    assert model["reference"] == "hf:org/repo:q8_0" and model["revision"] == remote.commit and model["license"] == "mit"
    assert Path(model["path"]).read_bytes() == QUANTS["m-Q8_0.gguf"]
    assert fetched(remote) == ["m-Q8_0.gguf"] and cli.leftovers() == []
    assert remote.requests[0][1] == "/api/models/org/repo"
    assert all(f"/resolve/{remote.commit}/" in path for _, path, _ in remote.requests[1:])
    # the same commit again: asked for, not fetched
    assert cli("pull", "hf:org/repo:q8_0")[0] == 0 and fetched(remote) == ["m-Q8_0.gguf"]
    # a new commit: fetched anew
    remote.commit = "f" * 39 + "0"
    assert cli("pull", "hf:org/repo:q8_0")[0] == 0 and fetched(remote) == ["m-Q8_0.gguf"] * 2
    # a run uses what is there without asking
    count = len(remote.requests)
    status, _, err = cli("show", "hf:org/repo:q8_0")
    assert status != 0 and len(remote.requests) == count  # the file is no real model, which only a reader can tell


def test_ambiguous_and_unknown_quants_list_the_choices(cli: Any, remote: Any) -> None:
    remote.repositories["org/repo"] = QUANTS
    for reference in ("hf:org/repo", "hf:org/repo:Q6_K"):
        status, _, err = cli("pull", reference)
        assert status == 3 and "m-Q4_0, m-Q8_0" in err and "Traceback" not in err
    remote.repositories["org/both"] = QUANTS | CHECKPOINT
    status, _, err = cli("pull", "hf:org/both")
    assert status == 3 and "safetensors, m-Q4_0, m-Q8_0" in err
    assert cli("pull", "hf:org/both:safetensors")[0] == 0


def test_safetensors(cli: Any, remote: Any) -> None:
    remote.repositories["org/repo"] = CHECKPOINT
    status, out, err = cli("pull", "hf:org/repo")
    assert status == 0, err
    folder = Path(out.strip())
    names = {path.name for path in folder.iterdir()}
    assert names == CHECKPOINT.keys() - {"README.md", "unused.safetensors", "pytorch_model.bin"} | {"trivet-model.json"}
    assert all((folder / name).read_bytes() == CHECKPOINT[name] for name in names - {"trivet-model.json"})
    order = fetched(remote)
    assert order.index("config.json") < order.index("model-00001-of-00002.safetensors")


def test_incomplete_checkpoints(cli: Any, remote: Any) -> None:
    remote.repositories["org/a"] = {k: v for k, v in CHECKPOINT.items() if k != "model-00002-of-00002.safetensors"}
    remote.repositories["org/b"] = {k: v for k, v in CHECKPOINT.items() if k != "config.json"}
    remote.repositories["org/c"] = {"README.md": b"hi"}
    for name, says in (("a", "model-00002-of-00002.safetensors"), ("b", "no config.json"), ("c", "neither .gguf nor")):
        status, _, err = cli("pull", f"hf:org/{name}")
        assert status != 0 and says in err and "Traceback" not in err
    assert cli.models() == []


def test_refusals_in_one_line(cli: Any, remote: Any) -> None:
    remote.repositories["org/gated"] = QUANTS
    remote.gated.add("org/gated")
    remote.repositories["org/broken"] = QUANTS
    remote.status["org/broken"] = 500
    for name, code, says in (
        ("gated", 1, "is gated: accept its terms"),
        ("missing", 3, "no repository org/missing"),
        ("broken", 1, "the hub refused hf:org/broken"),
    ):
        status, out, err = cli("pull", f"hf:org/{name}:Q4_0")
        assert (status, out) == (code, "") and says in err and "Traceback" not in err, err
        assert len(err.strip().splitlines()) == 1


def test_file_names_cannot_escape(cli: Any, remote: Any) -> None:
    remote.repositories["org/repo"] = {"../../../evil.gguf": GGUF}
    status, _, err = cli("pull", "hf:org/repo")
    assert status == 1 and "outside its folder" in err and not list(cli.home.rglob("evil*"))


def test_offline(cli: Any) -> None:
    status, _, err = cli("pull", "hf:org/repo", HF_HUB_OFFLINE="1")
    assert status == 1 and "HF_HUB_OFFLINE" in err
    status, _, err = cli("pull", "hf:org/repo", HF_ENDPOINT="http://127.0.0.1:9")
    assert status == 1 and "cannot be reached" in err and "Traceback" not in err


def test_wrong_sha256(cli: Any, remote: Any) -> None:
    remote.repositories["org/repo"] = QUANTS
    remote.lfs_sha256["m-Q4_0.gguf"] = "ab" * 32
    status, _, err = cli("pull", "hf:org/repo:Q4_0")
    assert status == 1 and "the hub states abab" in err and cli.models() == []
    assert not list(cli.home.rglob("m-Q4_0.gguf"))
    remote.lfs_sha256["m-Q4_0.gguf"] = "0" * 64  # a placeholder says nothing
    assert cli("pull", "hf:org/repo:Q4_0")[0] == 0


def test_interrupted_pull_is_resumed(cli: Any, remote: Any, wait_until: Any) -> None:
    content = os.urandom(24_000_000)  # the client writes 10 MB at a time
    remote.repositories["org/repo"] = {"m-Q4_0.gguf": content}
    remote.bytes_per_s = 12_000_000
    process = cli.start("pull", "hf:org/repo")
    wait_until(lambda: bool(fetched(remote)), process)
    wait_until(lambda: any(part.stat().st_size for part in cli.home.rglob("*.part")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "Traceback" not in err
    assert cli.models() == []
    remote.bytes_per_s = None
    status, out, err = cli("pull", "hf:org/repo")
    assert status == 0, err
    assert Path(out.strip()).read_bytes() == content and cli.leftovers() == []
    resumed = [span for method, path, span in remote.requests if method == "GET" and span]
    assert resumed and int(resumed[-1].removeprefix("bytes=").split("-")[0]) > 0


@pytest.mark.parametrize("size", ["1m"])
def test_full_disk(cli: Any, remote: Any, small_disk: Any, size: str) -> None:
    home = str(small_disk(f"size={size}"))
    remote.repositories["org/repo"] = {"m-Q4_0.gguf": os.urandom(3_000_000)}
    status, _, err = cli("pull", "hf:org/repo", TRIVET_HOME=home)
    assert status == 1 and "no space left on the disk" in err and "Traceback" not in err
