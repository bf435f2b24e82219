"""Configuration of an engine: frozen dataclasses with vLLM's field names, defaults and checks.

`EngineConfig.from_kwargs(model=..., **flat_names)` takes what a user wrote, `resolve(manifest)` fills in what depends
on the model and on this machine. A name or value that is not honoured raises ConfigError. The command line is
generated from the same fields (config_flags.py).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_type_hints

from .config_fields import ConfigError as ConfigError
from .config_fields import checked, option, option_metadata, refuse_non_defaults, require

if TYPE_CHECKING:
    from ..backends.contract.manifest import Manifest
    from ..backends.devices import DeviceChoice
    from .kv_cache.sizing import KVCachePlan, KVSizingRequest

logger = logging.getLogger(__name__)


class UsageContext(StrEnum):
    """Who runs the engine; decides the defaults of the batch limits."""

    LLM_CLASS = "LLM_CLASS"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    CLI = "CLI"  # a person at a terminal: ^C acts between two steps, so a step has to be short


CPU_BATCH_DEFAULTS: Final = {  # context -> (max_num_batched_tokens, max_num_seqs)
    UsageContext.LLM_CLASS: (2048, 256),
    UsageContext.OPENAI_API_SERVER: (2048, 128),
    UsageContext.CLI: (512, 256),
}
_LATER = "it comes in a later version of trivet; leave it out"
UNSUPPORTED: Final[dict[str, str]] = {  # names of vLLM that users bring along, and why they are refused
    "quantization": "the weights run in the format of the checkpoint; leave it out",
    "enforce_eager": "steps are always eager on the CPU, and decode steps always captured on a GPU; leave it out",
    "swap_space": "preempted requests are recomputed, nothing is swapped; leave it out",
    "cpu_offload_gb": "the weights are mapped from the checkpoint file already; leave it out",
    "revision": "write the revision into the model reference",
    "download_dir": "set TRIVET_HOME",
    "block_allocator": _LATER,
    "enable_lora": _LATER,
    "max_loras": _LATER,
    "max_lora_rank": _LATER,
    "speculative_config": _LATER,
    "structured_outputs_config": _LATER,
    "kv_transfer_config": _LATER,
    "kv_events_config": _LATER,
    "kv_offloading_size": _LATER,
    "prefix_match_unit": _LATER,
    "scheduler_cls": _LATER,
    "hf_overrides": _LATER,
    "rope_scaling": _LATER,
    "runner": _LATER,
    "convert": _LATER,
    "limit_mm_per_prompt": _LATER,
    "logits_processors": _LATER,
    "distributed_executor_backend": _LATER,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str = option("", "Path of a checkpoint or package, or a reference: NAME, pypi:NAME, hf:ORG/REPO[:QUANT].")
    tokenizer: str | None = option(None, "Tokenizer to use.", only="the checkpoint's own tokenizer is used")
    trust_remote_code: bool = option(False, "Run code from the checkpoint.", only="no code of a checkpoint is ever run")
    dtype: Literal["auto", "float32"] = option("auto", "Type of activations; the CPU back end has float32.")
    seed: int = option(
        0, "Source of the seeds of requests that bring none: the same seed, the same answers.", default_text="random"
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence, prompt and output, in tokens: 4096, 4k, 4K; -1 or auto = what fits the KV memory.",
        default_text="the model's own limit",
    )
    max_logprobs: int = option(20, "Most logprobs a request may ask for; -1 = the whole vocabulary.")
    logprobs_mode: str = option("raw_logprobs", "What logprobs are.", only=_LATER)
    generation_config: str = option(
        "auto", "Sampling defaults: auto = the model's own, vllm = none, or a folder with generation_config.json."
    )
    override_generation_config: dict[str, Any] = field(
        default_factory=dict, metadata=option_metadata("Sampling defaults that override generation_config, JSON.")
    )
    skip_tokenizer_init: bool = option(False, "Run without a tokenizer.", only=_LATER)

    def __post_init__(self) -> None:
        refuse_non_defaults(self)
        require(self.max_model_len is None or self.max_model_len == -1 or self.max_model_len >= 2,
                 "max_model_len", self.max_model_len, "2 tokens or more, or -1 for what fits")  # fmt: skip
        require(self.max_logprobs >= -1, "max_logprobs", self.max_logprobs, "-1 or more")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    verify: bool = option(True, "Compare the exported graph with a plain evaluation of the checkpoint.")
    tokenizer_pre: str | None = option(
        None,
        "Pre-tokenizer of a GGUF vocabulary, when the file names an unknown one.",
        default_text="the one that the file names",
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = option(16, "Tokens per KV block.")
    gpu_memory_utilization: float = option(
        0.92,
        "Share of the free memory for the KV cache.",
        default_text="half of it, at most 4 GiB or 65536 blocks, but enough for one sequence; on a GPU 0.92",
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes of the KV cache (2G, 512M); overrides the share.", default_text="by the share"
    )
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV blocks, for tests; overrides both.", default_text="by the bytes"
    )
    cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int16_per_token_head", "fp8", "fp8_e4m3"] = option(
        "auto",
        "Type of K and V in the cache; int16_per_token_head: on CPUs with AVX-512 VNNI; fp8 = fp8_e4m3: on GPUs; auto: "
        "int16_per_token_head where there is one and the checkpoint is not float32, else the checkpoint's own type, "
        "float16 if that is quantised (`trivet doctor -m MODEL` says which).",
        flag="kv_cache_dtype",
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV blocks of equal prompt prefixes.")
    prefix_caching_hash_algo: Literal["sha256"] = option("sha256", "Hash of the prefix cache.")

    def __post_init__(self) -> None:
        require(1 <= self.block_size <= 1024, "block_size", self.block_size, "1 to 1024 tokens")
        require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", self.gpu_memory_utilization, "(0, 1]")
        require(self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes > 0,
                 "kv_cache_memory_bytes", self.kv_cache_memory_bytes, "a positive number of bytes")  # fmt: skip
        require(self.num_gpu_blocks_override is None or self.num_gpu_blocks_override >= 2,
                 "num_gpu_blocks_override", self.num_gpu_blocks_override, "2 or more")  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_batched_tokens: int = option(
        2048,
        "Most tokens of one step.",
        default_text="512 in run, chat and complete, 2048 elsewhere",
    )
    max_num_seqs: int = option(128, "Most sequences of one step.", default_text="128 in the server, 256 elsewhere")
    max_num_partial_prefills: int = option(1, "Prompts in progress at once.", only=_LATER)
    max_long_partial_prefills: int = option(1, "Long prompts in progress at once.", only=_LATER)
    long_prefill_token_threshold: int = option(0, "Most tokens of one request in one step; 0 = no such limit.")
    enable_chunked_prefill: bool = option(True, "Split prompts that exceed the step's tokens.")
    policy: str = option("fcfs", "Order of requests.", flag="scheduling_policy", only=f"priority: {_LATER}")
    scheduler_reserve_full_isl: bool = option(True, "Admit a request only when its whole prompt fits the KV cache.")
    watermark: float = option(0.0, "Share of the KV blocks that stays free when a request is admitted beside others.")
    async_scheduling: bool | None = option(
        None, "Schedule the next step during this one (not yet supported).", default_text="off"
    )
    stream_interval: int = option(1, "Tokens per streamed output.", only=_LATER)

    def __post_init__(self) -> None:
        refuse_non_defaults(self)
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        threshold = self.long_prefill_token_threshold
        require(threshold >= 0, "long_prefill_token_threshold", threshold, "0 or more")
        require(0 <= self.watermark < 1, "watermark", self.watermark, "[0, 1)")
        require(not self.async_scheduling, "async_scheduling", True, f"False; {_LATER}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be greater than or equal to "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a token per step"
            )

    def verify_max_model_len(self, max_model_len: int) -> None:
        """Raises ConfigError when prompts could not be computed; warns when the budget can never be used."""
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than max_model_len "
                f"({max_model_len}) and enable_chunked_prefill is off: longer prompts could never run; raise the "
                "first, lower the second or turn chunked prefill on"
            )
        if self.max_num_batched_tokens > self.max_num_seqs * max_model_len:
            logger.warning(
                "max_num_batched_tokens (%d) exceeds max_num_seqs * max_model_len (%d): no step can use it up",
                self.max_num_batched_tokens,
                self.max_num_seqs * max_model_len,
            )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    tensor_parallel_size: int = option(1, "Devices a layer is split over.", only=_LATER)
    pipeline_parallel_size: int = option(1, "Devices the layers are spread over.", only=_LATER)
    data_parallel_size: int = option(1, "Copies of the model.", only=_LATER)
    enable_expert_parallel: bool = option(False, "Spread experts over devices.", only=_LATER)

    def __post_init__(self) -> None:
        refuse_non_defaults(self)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    device: str = option(
        "auto",
        "Where the model runs: cpu; cuda = the first GPU that can be used, with a warning the CPU where there is none; "
        "cuda:N = that GPU and nothing else; auto = cpu, with --require-gpu the first GPU.",
    )
    require_gpu: bool = option(False, "Fail where no GPU can be used instead of running on the CPU.")
    num_threads: int | None = option(
        None, "Threads of the CPU back end.", aliases=("threads",), default_text="physical cores"
    )
    activation_dtype: Literal["auto", "int8", "float32"] = option(
        "auto", "Activations in matrix products: int8 per block of 32, or float32; auto = by weight format."
    )
    cpu_tier: str | None = option(None, "Kernel tier to force.", default_text="the best this CPU has")

    def __post_init__(self) -> None:
        require(self.num_threads is None or 1 <= self.num_threads <= 1024, "num_threads", self.num_threads, "1 to 1024")
        known = re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device) is not None
        require(known, "device", self.device, "'auto', 'cpu', 'cuda' or 'cuda:N'")
        require(not self.require_gpu or self.device != "cpu", "device", self.device, "a GPU, as require_gpu is set")

    def choose(self) -> DeviceChoice:
        """The device on this machine. Raises UnsupportedDeviceError for one that is required and cannot be used."""
        from ..backends.devices import choose_device

        return choose_device(self.device, require_gpu=self.require_gpu)


SECTIONS: Final[dict[str, type[Any]]] = {
    "model_config": ModelConfig,
    "load_config": LoadConfig,
    "cache_config": CacheConfig,
    "scheduler_config": SchedulerConfig,
    "parallel_config": ParallelConfig,
    "device_config": DeviceConfig,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from. `explicit`: flat names the user gave; resolve() sets what follows it."""

    model_config: ModelConfig
    load_config: LoadConfig = LoadConfig()
    cache_config: CacheConfig = CacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    device_config: DeviceConfig = DeviceConfig()
    explicit: frozenset[str] = frozenset()
    kv_cache_plan: KVCachePlan | None = None
    device_choice: DeviceChoice | None = None

    @classmethod
    def from_kwargs(
        cls,
        model: str | os.PathLike[str],
        *,
        usage_context: UsageContext = UsageContext.LLM_CLASS,
        **kwargs: Any,
    ) -> Self:
        """From vLLM's flat names (`max_model_len=...`, `kv_cache_dtype=...`). Raises ConfigError.

        An explicit max_num_batched_tokens below an explicit max_num_seqs is an error; a defaulted max_num_seqs is
        lowered to it.
        """
        values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name, value in {"model": os.fspath(model), **kwargs}.items():
            section, field_name, hint = _field_of(name)
            values[section][field_name] = checked(name, value, hint)
        scheduler = values["scheduler_config"]
        default_tokens, default_seqs = CPU_BATCH_DEFAULTS[usage_context]
        scheduler.setdefault("max_num_batched_tokens", max(default_tokens, scheduler.get("max_num_seqs", 0)))
        scheduler.setdefault("max_num_seqs", max(1, min(default_seqs, scheduler["max_num_batched_tokens"])))
        sections = {section: SECTIONS[section](**v) for section, v in values.items()}
        return cls(**sections, explicit=frozenset(kwargs))

    @property
    def max_model_len(self) -> int:
        """Tokens. Raises RuntimeError before resolve()."""
        return self.resolved_plan.max_model_len

    @property
    def resolved_plan(self) -> KVCachePlan:
        """Raises RuntimeError before resolve()."""
        if self.kv_cache_plan is None:
            raise RuntimeError("EngineConfig.resolve(manifest) has not been called")
        return self.kv_cache_plan

    @property
    def resolved_device(self) -> DeviceChoice:
        """Raises RuntimeError before resolve()."""
        if self.device_choice is None:
            raise RuntimeError("EngineConfig.resolve(manifest) has not been called")
        return self.device_choice

    def resolve(
        self, manifest: Manifest, *, free_bytes: int | None = None, environ: Mapping[str, str] = os.environ
    ) -> Self:
        """A copy with the device, max_model_len, cache_dtype, the batch limits and the KV cache plan settled.

        free_bytes: memory to plan with, None = asked of the device, or of the system for the CPU. Raises ConfigError,
        KVCacheError, and BackendError for a device that cannot be used or has no such cache.
        """
        from ..backends.devices import free_device_bytes
        from .kv_cache.sizing import plan_kv_cache

        choice = self.device_config.choose()
        request = self._sizing_request(manifest, choice.name)
        device_bytes = free_device_bytes(choice.name) if free_bytes is None else None
        plan = plan_kv_cache(
            request,
            free_bytes=free_bytes if device_bytes is None else device_bytes,
            device_memory=device_bytes is not None,
            environ=environ,
        )
        scheduler = self.scheduler_config
        if "max_num_batched_tokens" not in self.explicit:
            tokens = scheduler.max_num_batched_tokens
            if not scheduler.enable_chunked_prefill:
                tokens = max(tokens, plan.max_model_len)
            scheduler = replace(
                scheduler, max_num_batched_tokens=min(tokens, scheduler.max_num_seqs * plan.max_model_len)
            )
        scheduler.verify_max_model_len(plan.max_model_len)
        return replace(
            self,
            model_config=replace(self.model_config, max_model_len=plan.max_model_len),
            cache_config=replace(self.cache_config, cache_dtype=plan.cache_dtype),  # type: ignore[arg-type]
            scheduler_config=scheduler,
            kv_cache_plan=plan,
            device_choice=choice,
        )

    def _sizing_request(self, manifest: Manifest, device: str) -> KVSizingRequest:
        from ..backends.devices import DeviceKVCache
        from .kv_cache.sizing import KVSizingRequest

        model_max_len = manifest.architecture.max_position_embeddings
        max_model_len = self.model_config.max_model_len
        if max_model_len is not None and max_model_len > model_max_len:
            raise ConfigError(
                f"max_model_len is {max_model_len}; {manifest.architecture.name} was made for at most {model_max_len} "
                "tokens (max_position_embeddings)"
            )
        cache = self.cache_config
        available = DeviceKVCache(device, self.device_config.cpu_tier, manifest.kv_cache, cache.block_size)
        share_given = "gpu_memory_utilization" in self.explicit
        return KVSizingRequest(
            kv_cache_specs=manifest.kv_cache,
            block_size=cache.block_size,
            cache_dtype=available.resolve(cache.cache_dtype, manifest.architecture.dtype),
            model_max_len=model_max_len,
            max_model_len=max_model_len,
            num_gpu_blocks_override=cache.num_gpu_blocks_override,
            kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
            gpu_memory_utilization=cache.gpu_memory_utilization if share_given else None,
            weight_bytes=sum(source.size_bytes for source in manifest.sources),
        )


# --- flat names -----------------------------------------------------------------------------------------------------
@cache
def flat_fields() -> dict[str, tuple[str, str, Any]]:
    """Flat name -> (section, field name, type hint), in the order of definition."""
    flat = {}
    for section, config_class in SECTIONS.items():
        hints = get_type_hints(config_class)
        for f in fields(config_class):
            flat[f.metadata["flag"] or f.name] = (section, f.name, hints[f.name])
    return flat


def _field_of(name: str) -> tuple[str, str, Any]:
    if name in flat_fields():
        return flat_fields()[name]
    if name in UNSUPPORTED:
        raise ConfigError(f"{name} is not supported: {UNSUPPORTED[name]}")
    import difflib  # a start that is not refused is faster without

    close = difflib.get_close_matches(name, flat_fields(), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"unknown option {name!r}; {hint}Valid options: {', '.join(sorted(flat_fields()))}")
