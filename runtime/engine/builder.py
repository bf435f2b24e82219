"""EngineConfig -> the parts that LLM and AsyncLLM are made of."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..._garbage import collection_paused
from ..._log import get_logger
from ..config import ConfigError
from ..model_loader import ProgressCallback, load_model, read_generation_folder, resolve_package
from ..runner.input_batch import InputBatch
from ..runner.model_runner import ModelRunner
from ..sampling_params import SamplingParams
from ..scheduler.scheduler import Scheduler
from .core import EngineCore, EngineStats
from .input_processor import InputProcessor

if TYPE_CHECKING:
    from ...backends.contract.manifest import Manifest
    from ..config import EngineConfig, ModelConfig
    from ..tokenizer import Tokenizer

logger = get_logger(__name__)

# generation_config.json name -> SamplingParams name
_GENERATION_FIELDS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class EngineParts(msgspec.Struct, frozen=True):
    config: EngineConfig  # resolved
    manifest: Manifest
    tokenizer: Tokenizer
    core: EngineCore
    input_processor: InputProcessor
    generation_defaults: dict[str, Any]  # by SamplingParams name

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.generation_defaults)

    @property
    def default_max_tokens(self) -> int | None:
        """The length of an answer that the model, or override_generation_config, sets; None = neither does."""
        max_tokens: int | None = self.generation_defaults.get("max_tokens")
        return max_tokens


def build_engine(config: EngineConfig, *, progress: ProgressCallback | None = None) -> EngineParts:
    """Load the model and wire scheduler and runner. `core.close()` frees everything."""
    package_dir, manifest = resolve_package(config.model_config.model, config.load_config, progress=progress)
    tokenizer_loading = _TokenizerThread(package_dir, manifest)
    with collection_paused():
        try:
            # As long as the session's native half lasts; earlier, the two would only wait for the interpreter in turns.
            loaded = load_model(config, package_dir, manifest, meanwhile=tokenizer_loading.start)
        finally:
            tokenizer_loading.wait()
    try:
        config, tokenizer = loaded.config, tokenizer_loading.result()
        generation_defaults = _generation_defaults(config.model_config, manifest)
        block_size, vocab_size = config.cache_config.block_size, manifest.architecture.vocab_size
        scheduler_config = config.scheduler_config
        scheduler = Scheduler(
            scheduler_config,
            num_gpu_blocks=config.resolved_plan.num_gpu_blocks,
            block_size=block_size,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.cache_config.enable_prefix_caching,
            copy_block_heads=True,
        )
        batch = InputBatch(
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            max_num_seqs=scheduler_config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=block_size,
            vocab_size=vocab_size,
        )
        input_processor = InputProcessor(
            manifest,
            tokenizer,
            max_model_len=config.max_model_len,
            max_logprobs=config.model_config.max_logprobs,
            draw_seed=_seed_source(config),
        )
        core = EngineCore(
            scheduler,
            ModelRunner(loaded.session, batch),
            close_model=loaded.session.close,
            interrupt_model=loaded.session.interrupt,
        )
    except BaseException:
        loaded.session.close()
        raise
    return EngineParts(config, manifest, tokenizer, core, input_processor, generation_defaults)


class _TokenizerThread(threading.Thread):
    """Loads a tokenizer. The executors of concurrent.futures could, too, and take 2 ms to import."""

    def __init__(self, package_dir: Path, manifest: Manifest) -> None:
        super().__init__(name="trivet-tokenizer")
        self._package_dir, self._manifest = package_dir, manifest
        self._tokenizer: Tokenizer | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            from ..tokenizer import Tokenizer

            self._tokenizer = Tokenizer.from_package(self._package_dir, self._manifest)
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        if self.ident is not None:  # it has been started
            self.join()

    def result(self) -> Tokenizer:
        """After wait(). Raises what loading raised."""
        if self._error is not None:
            raise self._error
        assert self._tokenizer is not None
        return self._tokenizer


def _seed_source(config: EngineConfig) -> Callable[[], int]:
    """Seeds (64 bits, unsigned) for requests without one: reproducible if the engine was given a seed."""
    if "seed" in config.explicit:
        import random  # a start without a seed is faster without

        source = random.Random(config.model_config.seed)
        return lambda: source.getrandbits(64)
    return lambda: int.from_bytes(os.urandom(8))


def _generation_defaults(model_config: ModelConfig, manifest: Manifest) -> dict[str, Any]:
    """What the model, then override_generation_config, say about sampling. ConfigError on a value out of range."""
    overrides = model_config.override_generation_config
    if unknown := sorted(set(overrides) - set(_GENERATION_FIELDS)):
        raise ConfigError(
            f"override_generation_config: {unknown} are not sampling defaults; known are {sorted(_GENERATION_FIELDS)}"
        )
    values = {**_model_generation_config(model_config.generation_config, manifest, overrides), **overrides}
    defaults = {ours: values[theirs] for theirs, ours in _GENERATION_FIELDS.items() if values.get(theirs) is not None}
    try:
        SamplingParams(**{_GENERATION_FIELDS[name]: value for name, value in overrides.items() if value is not None})
    except ValueError as exc:
        raise ConfigError(f"override_generation_config: {exc}") from exc
    try:
        SamplingParams(**defaults)
    except ValueError as exc:
        raise ConfigError(
            f"the sampling defaults of the model cannot be used ({exc}): start with generation_config='vllm', or set "
            "override_generation_config"
        ) from exc
    return defaults


def _model_generation_config(source: str, manifest: Manifest, overrides: Container[str]) -> Mapping[str, Any]:
    """`overrides`: names whose values here do not matter."""
    if source == "vllm":
        return {}
    if source == "auto":
        where, generation, ignored = "the model", manifest.generation, manifest.generation_keys_without_effect
    else:
        where = f"generation_config={source!r}"
        generation, ignored = read_generation_folder(Path(source), manifest.tokenizer.eos_token_ids)
        own = {name: getattr(manifest.generation, name) for name in _GENERATION_FIELDS if name not in overrides}
        lost = [f"{k} {v:.10g}" for k, v in own.items() if v is not None and getattr(generation, k) is None]
        if lost:
            logger.warning(
                "%s is in place of the model's own, whose %s %s not count",
                where,
                ", ".join(lost),
                "does" if len(lost) == 1 else "do",
            )
    if ignored:
        logger.warning(
            "%s sets %s: without effect in this version; generation_config='vllm' leaves out all it sets",
            where,
            ", ".join(ignored),
        )
    return {name: getattr(generation, name) for name in _GENERATION_FIELDS}


def stats_dict(stats: EngineStats) -> dict[str, int | float]:
    """EngineStats as numbers by name, for health details and reports."""
    scheduler = stats.scheduler
    return {
        "num_requests_running": scheduler.num_running_reqs,
        "num_requests_waiting": scheduler.num_waiting_reqs,
        "kv_cache_usage": scheduler.kv_cache_usage,
        "prefix_cache_queries": scheduler.prefix_cache_queries,
        "prefix_cache_hits": scheduler.prefix_cache_hits,
        "num_preemptions": scheduler.num_preemptions,
        "num_steps": stats.num_steps,
        "num_computed_tokens": stats.num_computed_tokens,
        "num_generated_tokens": stats.num_generated_tokens,
    }
