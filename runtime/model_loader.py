"""A model reference -> an open ModelSession with its KV cache. The runtime's only file that knows the exporters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .._log import get_logger
from .config_fields import ConfigError
from .errors import KVCacheError, ModelLoadError

if TYPE_CHECKING:
    from ..backends.contract.manifest import GenerationDefaults, Manifest
    from ..backends.session import ModelSession
    from .config import EngineConfig, LoadConfig

logger = get_logger(__name__)

ProgressCallback = Callable[[str, float], None]


class LoadedModel(msgspec.Struct, frozen=True):
    session: ModelSession  # its KV cache is allocated
    config: EngineConfig  # resolved: max_model_len, KV cache plan


def resolve_package(
    model: str, load_config: LoadConfig, *, progress: ProgressCallback | None = None
) -> tuple[Path, Manifest]:
    """The package folder of a checkpoint, a package or a reference, exporting and fetching as needed.

    The manifest of a model of the catalogue, given by its name or reference, has the catalogue's sampling defaults.
    progress(what, share done in [0, 1]). Raises ModelLoadError, or the model store's and the exporters' own errors.
    """
    from .model_store import catalogue, resolve

    path = resolve(model)
    if not _is_package(path):
        from ..exporters import export

        path = export(path, verify=load_config.verify, tokenizer_pre=load_config.tokenizer_pre, progress=progress)
    manifest = _read_manifest(path)
    _check_sources(path, manifest)
    entry = catalogue().models.get(catalogue().name_of(model) or model)
    if entry is not None and entry.generation is not None:
        manifest = msgspec.structs.replace(manifest, generation=entry.generation)
    return path, manifest


def read_generation_folder(folder: Path, eos_token_ids: Sequence[int]) -> tuple[GenerationDefaults, list[str]]:
    """Sampling defaults of a folder's generation_config.json, and its keys without effect; ConfigError if unusable.

    `eos_token_ids` are the model's.
    """
    from ..exporters.errors import CheckpointError, ExportError
    from ..exporters.generation import read_generation_folder

    try:
        return read_generation_folder(folder, eos_token_ids)
    except CheckpointError as exc:
        raise ConfigError(
            f"generation_config={str(folder)!r} is not auto, vllm or a folder with generation_config.json: {exc}"
        ) from exc
    except ExportError as exc:
        raise ConfigError(str(exc)) from exc


def load_model(
    config: EngineConfig, package_dir: Path, manifest: Manifest, *, meanwhile: Callable[[], None] = lambda: None
) -> LoadedModel:
    """Open the package that `resolve_package` found and allocate its KV cache. The caller closes the session.

    meanwhile: see ModelSession.
    """
    from ..backends.errors import BackendError, DeviceMemoryError
    from ..backends.session import ModelSession

    try:
        config = config.resolve(manifest)
        if config.resolved_device.fallback:
            logger.warning("RUNNING ON THE CPU, a GPU was asked for: %s", config.resolved_device.fallback)
        device = config.device_config
        session = ModelSession(
            package_dir,
            manifest,
            device=config.resolved_device.name,
            num_threads=device.num_threads,
            activation_dtype=device.activation_dtype,
            cpu_tier=device.cpu_tier,
            meanwhile=meanwhile,
        )
    except DeviceMemoryError as exc:
        weights = sum(source.size_bytes for source in manifest.sources)
        raise ModelLoadError(f"{exc}. The checkpoint has {weights} bytes") from exc
    except BackendError as exc:
        _check_sources(package_dir, manifest)
        raise ModelLoadError(str(exc)) from exc
    plan = config.resolved_plan
    try:
        _check_sources(package_dir, manifest)  # once more: a file replaced since then would be answered from unnoticed
        session.allocate_kv_cache(
            num_blocks=plan.num_gpu_blocks, block_size=config.cache_config.block_size, dtype=plan.cache_dtype
        )
    except (MemoryError, BackendError) as exc:
        session.close()
        raise KVCacheError(
            f"no KV cache of {plan.num_gpu_blocks} blocks of {config.cache_config.block_size} tokens "
            f"({plan.total_bytes} bytes): {exc}. Lower kv_cache_memory_bytes, max_model_len or max_num_seqs"
        ) from exc
    except BaseException:
        session.close()
        raise
    return LoadedModel(session, config)


def _is_package(path: Path) -> bool:
    from ..backends.contract.manifest import GRAPH_NAME, MANIFEST_NAME

    return (path / MANIFEST_NAME).is_file() and (path / GRAPH_NAME).is_file()


def _read_manifest(package_dir: Path) -> Manifest:
    from ..backends.contract.manifest import read_manifest

    try:
        return read_manifest(package_dir)
    except (OSError, ValueError, msgspec.MsgspecError) as exc:
        raise ModelLoadError(
            f"{package_dir} is not a model package that this trivet reads ({exc}): make it anew with `trivet export`, "
            "or read it with the trivet that made it"
        ) from exc


def _check_sources(package_dir: Path, manifest: Manifest) -> None:
    from ..exporters.errors import PackageError
    from ..exporters.package import check_sources

    try:
        check_sources(manifest)
    except PackageError as exc:
        raise ModelLoadError(f"{package_dir} cannot be used: {exc}") from exc
