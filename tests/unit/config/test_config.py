from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from trivet.backends.contract.manifest import (
    SCHEMA_VERSION,
    Architecture,
    GenerationDefaults,
    KVCacheSpec,
    Manifest,
    Source,
    TokenizerSpec,
    Verification,
)
from trivet.runtime.config import (
    SECTIONS,
    UNSUPPORTED,
    ConfigError,
    EngineConfig,
    SchedulerConfig,
    UsageContext,
    flat_fields,
)

GIB = 1 << 30


def make_manifest(*, dtype: str = "quantized", max_len: int = 2048, weight_bytes: int = GIB) -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION,
        trivet_version="0",
        source_dir="/",
        sources=[Source(name="w.gguf", size_bytes=weight_bytes, mtime_ns=0, digest="")],
        architecture=Architecture(
            family="llama", name="tiny", vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=max_len, weight_formats={"q8_0": 1}, dtype=dtype, num_parameters=1,
        ),
        kv_cache=[KVCacheSpec(layer=i, num_kv_heads=2, head_dim=64, kv_offset=256 * i) for i in range(2)],
        tokenizer=TokenizerSpec(),
        generation=GenerationDefaults(),
        verification=Verification(performed=False),
    )  # fmt: skip


def resolve(config: EngineConfig, **manifest: Any) -> EngineConfig:
    return config.resolve(make_manifest(**manifest), free_bytes=64 * GIB, environ={})


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (UsageContext.LLM_CLASS, (2048, 256)),
        (UsageContext.OPENAI_API_SERVER, (2048, 128)),
        (UsageContext.CLI, (512, 256)),
    ],
)
def test_batch_defaults_depend_on_who_runs_the_engine(context: UsageContext, expected: tuple[int, int]) -> None:
    scheduler = resolve(EngineConfig.from_kwargs("m", usage_context=context)).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == expected


def test_an_explicit_budget_below_explicit_seqs_is_an_error_but_lowers_defaulted_seqs() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(4\) must be greater than or equal to .* \(8\)"):
        EngineConfig.from_kwargs("m", max_num_batched_tokens=4, max_num_seqs=8)
    assert EngineConfig.from_kwargs("m", max_num_batched_tokens=4).scheduler_config.max_num_seqs == 4
    many = EngineConfig.from_kwargs("m", max_num_seqs=5000).scheduler_config
    assert (many.max_num_batched_tokens, many.max_num_seqs) == (5000, 5000)


def test_a_defaulted_budget_is_no_larger_than_a_step_can_be(caplog: pytest.LogCaptureFixture) -> None:
    config = resolve(EngineConfig.from_kwargs("m", max_model_len=64, max_num_seqs=2))
    assert config.scheduler_config.max_num_batched_tokens == 128
    with caplog.at_level(logging.WARNING):
        resolve(EngineConfig.from_kwargs("m", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=129))
    assert "exceeds max_num_seqs * max_model_len (128)" in caplog.text


def test_without_chunked_prefill_a_prompt_must_fit_the_budget() -> None:
    config = EngineConfig.from_kwargs("m", enable_chunked_prefill=False, max_num_batched_tokens=1000)
    with pytest.raises(ConfigError, match=r"\(1000\) is smaller than max_model_len \(2048\)"):
        resolve(config)
    raised = resolve(EngineConfig.from_kwargs("m", enable_chunked_prefill=False), max_len=8192)
    assert raised.scheduler_config.max_num_batched_tokens == 8192


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_model_length": 5}, "unknown option 'max_model_length'; did you mean max_model_len?"),
        ({"zzz": 5}, "unknown option 'zzz'; Valid options: activation_dtype, "),
        ({"block_size": "16"}, "block_size is '16' (str); expected int"),
        ({"block_size": True}, "block_size is True (bool); expected int"),
        ({"verify": 1}, "verify is 1 (int); expected bool"),
        ({"max_model_len": 1}, "max_model_len is 1; expected 2 tokens or more, or -1"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "expected one of auto, float32, float16, bfloat16, int16_per_token_head, fp8, fp8_e4m3",
        ),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0; expected (0, 1]"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan; expected (0, 1]"),
        ({"watermark": 1.0}, "watermark is 1.0; expected [0, 1)"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override is 1; expected 2 or more"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0; expected a positive number of bytes"),
        ({"scheduling_policy": "priority"}, "scheduling_policy='priority' is not supported, only 'fcfs'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported, only 1: it comes in a later version"),
        ({"max_num_partial_prefills": 2}, "max_num_partial_prefills=2 is not supported"),
        ({"async_scheduling": True}, "async_scheduling is True; expected False"),
        ({"trust_remote_code": True}, "trust_remote_code=True is not supported, only False: no code of a checkpoint"),
        ({"quantization": "awq"}, "quantization is not supported: the weights run in the format of the checkpoint"),
        ({"num_threads": 0}, "num_threads is 0; expected 1 to 1024"),
        ({"num_threads": 1025}, "num_threads is 1025; expected 1 to 1024"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_kwargs("m", **kwargs)
    assert message in str(error.value)


def test_max_model_len() -> None:
    with pytest.raises(RuntimeError, match="resolve"):
        _ = EngineConfig.from_kwargs("m").max_model_len
    assert resolve(EngineConfig.from_kwargs("m")).max_model_len == 2048
    assert resolve(EngineConfig.from_kwargs("m", max_model_len=100)).model_config.max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len is 4096; tiny was made for at most 2048 tokens"):
        resolve(EngineConfig.from_kwargs("m", max_model_len=4096))


@pytest.mark.parametrize(
    ("asked", "checkpoint", "tier", "expected"),
    [
        ("auto", "quantized", "avx512_vnni", "int16_per_token_head"),
        ("auto", "bfloat16", "avx512_vnni", "int16_per_token_head"),
        ("auto", "float32", "avx512_vnni", "float32"),
        ("auto", "quantized", "avx2", "float16"),
        ("auto", "quantized", "avx_vnni", "float16"),
        ("auto", "bfloat16", "avx2", "bfloat16"),
        ("float32", "quantized", "avx512_vnni", "float32"),
        ("int16_per_token_head", "float32", "avx512_vnni", "int16_per_token_head"),
    ],
)
def test_kv_cache_dtype(asked: str, checkpoint: str, tier: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.backends.library.select_tier", lambda forced: forced or tier)
    config = resolve(EngineConfig.from_kwargs("m", kv_cache_dtype=asked), dtype=checkpoint)
    assert config.cache_config.cache_dtype == config.resolved_plan.cache_dtype == expected


def test_the_default_memory_rule_applies_until_a_share_is_asked_for() -> None:
    default = resolve(EngineConfig.from_kwargs("m")).resolved_plan
    asked = resolve(EngineConfig.from_kwargs("m", gpu_memory_utilization=0.92)).resolved_plan
    assert default.num_gpu_blocks == 1 << 16  # the tiny model's limit; unit/kv_cache/test_sizing.py has the rest
    assert asked.total_bytes == pytest.approx(0.92 * 63 * GIB, rel=1e-3)


# --- against vLLM -------------------------------------------------------------------------------------------------
VLLM = json.loads((Path(__file__).parents[2] / "data" / "vllm_defaults.json").read_text())
OURS_DIFFER = {
    "model": "trivet has a default model in the command line, not here",
    "block_size": "vLLM's None stands for its DEFAULT_BLOCK_SIZE",
}


def test_defaults_of_shared_fields_are_vllms() -> None:
    assert VLLM["vllm"].startswith("0.26.0")
    compared = 0
    for config_class in SECTIONS.values():
        theirs = VLLM["classes"].get(config_class.__name__, {})
        defaults = config_class()
        for name in config_class.__struct_fields__:
            if name in theirs and name not in OURS_DIFFER:
                assert getattr(defaults, name) == theirs[name], f"{config_class.__name__}.{name}"
                compared += 1
    assert compared >= 25
    assert SECTIONS["cache_config"]().block_size == VLLM["block_size"]
    theirs = dict(VLLM["cpu_batch_defaults"])  # which know no command line
    assert theirs.pop("LLM_CLASS") == [4096, 256]  # ours is half of it, for 50 MB less
    assert {name: list(value) for name, value in cpu_batch_defaults().items() if name in theirs} == theirs


def cpu_batch_defaults() -> dict[str, tuple[int, int]]:
    from trivet.runtime.config import CPU_BATCH_DEFAULTS

    return {context.value: value for context, value in CPU_BATCH_DEFAULTS.items()}


def test_flat_names_are_vllms_but_for_our_own() -> None:
    ours = set(flat_fields()) - set(VLLM["engine_args"])
    assert ours == {
        "activation_dtype",
        "cpu_tier",
        "device",
        "num_threads",
        "require_gpu",
        "tokenizer_pre",
        "verify",
    }


def test_unsupported_names_are_no_options_and_vllm_or_classic_names() -> None:
    assert not set(UNSUPPORTED) & set(flat_fields())
    classic = {"swap_space", "block_allocator", "rope_scaling", "cpu_offload_gb"}
    assert set(UNSUPPORTED) - set(VLLM["engine_args"]) <= classic


def test_scheduler_config_is_checked_on_its_own() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs is 0; expected 1 or more"):
        SchedulerConfig(max_num_seqs=0)
