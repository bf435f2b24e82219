from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import pytest
from trivet.runtime.config import ConfigError, EngineConfig
from trivet.runtime.config_flags import (
    add_cli_flags,
    expand_dotted_flags,
    human_readable_int,
    iter_cli_fields,
    parse_value,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("1k", 1000), ("1K", 1024), ("1.5k", 1500), ("25.6k", 25_600), ("2M", 2 << 20), ("2m", 2_000_000),
     ("1G", 1 << 30), ("1.1m", 1_100_000)],
)  # fmt: skip
def test_human_sizes(text: str, value: int) -> None:
    assert human_readable_int(text) == value


@pytest.mark.parametrize("text", ["1.5K", "", "k", "1kk", "1 k", "0x10"])
def test_wrong_human_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        human_readable_int(text)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("max_model_len", "auto", -1), ("max_model_len", "-1", -1), ("max_model_len", "4K", 4096),
     ("max_model_len", "None", None), ("gpu_memory_utilization", "0.5", 0.5), ("verify", "false", False),
     ("kv_cache_dtype", "float16", "float16"), ("override_generation_config", '{"top_p": 0.5}', {"top_p": 0.5})],
)  # fmt: skip
def test_parse_value(name: str, text: str, value: Any) -> None:
    assert parse_value(name, text) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("block_size", "x", "block_size is 'x'; expected int"),
        ("block_size", "1.5K", "whole numbers only; 1.5k is decimal"),
        (
            "kv_cache_dtype",
            "fp8_e5m2",
            "expected one of auto, float32, float16, bfloat16, int16_per_token_head, fp8, fp8_e4m3",
        ),
        ("verify", "yes", "verify is 'yes'; expected bool"),
        ("override_generation_config", "[1]", "expected a JSON object"),
        ("nope", "1", "unknown option 'nope'"),
    ],
)
def test_parse_value_refuses(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        parse_value(name, text)


def parse(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_cli_flags(parser)
    json_names = {f.name for f in iter_cli_fields() if f.kind == "json"}
    return vars(parser.parse_args(expand_dotted_flags(argv, json_names)))


def test_flags_give_exactly_what_was_written() -> None:
    assert parse() == {}
    given = parse("--max-model-len", "4k", "--no-enable-prefix-caching", "--threads", "3", "--kv-cache-dtype=float32")
    assert given == {
        "max_model_len": 4000, "enable_prefix_caching": False, "num_threads": 3, "kv_cache_dtype": "float32"
    }  # fmt: skip
    config = EngineConfig.from_kwargs("m", **given)
    assert config.cache_config.cache_dtype == "float32" and config.device_config.num_threads == 3


def test_every_flag_has_a_help_and_its_default_is_accepted() -> None:
    for f in iter_cli_fields():
        assert f.help.endswith((".", ")")), f.name
        EngineConfig.from_kwargs("m", **{f.name: f.default})


def test_help_says_what_happens_without_a_flag() -> None:
    parser = argparse.ArgumentParser(prog="t")
    add_cli_flags(parser)
    text = " ".join(parser.format_help().split())
    assert "default: None" not in text and "default: True" not in text and "default: False" not in text
    assert "for the KV cache (default: half of it, at most 4 GiB" in text  # 0.92 is the default on a GPU only
    assert "the same answers (default: random)" in text
    assert "Most sequences of one step (default: 128 in the server, 256 elsewhere)" in text
    assert "--no-enable-prefix-caching Reuse the KV blocks of equal prompt prefixes (default: on)" in text


def test_help_leaves_out_flags_that_take_nothing_but_their_default() -> None:
    parser = argparse.ArgumentParser(prog="t")
    add_cli_flags(parser)
    text = parser.format_help().partition("ModelConfig:")[2]
    hidden = [f for f in iter_cli_fields() if f.hidden]
    assert {"tensor_parallel_size", "tokenizer", "prefix_caching_hash_algo"} <= {f.name for f in hidden}
    assert not [f.flag for f in hidden if f"{f.flag} " in text]
    assert parse("--tensor-parallel-size", "2") == {"tensor_parallel_size": 2}  # refused by name, as ever
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 is not supported"):
        EngineConfig.from_kwargs("m", tensor_parallel_size=2)


def test_wrong_flags_abort() -> None:
    with pytest.raises(argparse.ArgumentError, match="expected int"):
        parse("--block-size", "x")
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse("--max-model-length", "5")


def test_dotted_flags_become_one_json_flag_in_place() -> None:
    names = ["override_generation_config", "other"]
    assert expand_dotted_flags(
        ["serve", "--override-generation-config.top_p", "0.5", "--x", "1",
         "--override-generation-config.a.b=hello", "--override-generation-config.ids+", "3",
         "--override_generation_config.ids+", "4", "--", "--override-generation-config.no"], names,
    ) == [
        "serve", "--override-generation-config", '{"top_p": 0.5, "a": {"b": "hello"}, "ids": [3, 4]}', "--x", "1",
        "--", "--override-generation-config.no",
    ]  # fmt: skip
    merged = parse("--override-generation-config", '{"top_k": 5}', "--override-generation-config.top_p", "0.5")
    assert merged == {"override_generation_config": {"top_k": 5, "top_p": 0.5}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--g.a", "1", "--g.a", "2"], "'a' is given twice"),
        (["--g.a", "1", "--g.a.b", "2"], "'a' already has a value that is not an object"),
        (["--g.a", "1", "--g.a+", "2"], "'a' already has a value that is not a list"),
        (["--g.a"], "--g.a needs a value"),
        (["--g", "{"], "--g is '{'; expected a JSON object"),
    ],
)
def test_dotted_flags_that_clash(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        expand_dotted_flags(argv, ["g"])
    assert message in str(error.value)


def test_the_flags_load_nothing_heavy() -> None:
    code = (
        "import argparse, sys; from trivet.runtime.config_flags import add_cli_flags; "
        "add_cli_flags(argparse.ArgumentParser()); "
        "print([m for m in ('numpy', 'yaml', 'onnxruntime', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env())
    assert done.stdout.strip() == "[]"


def _env() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
