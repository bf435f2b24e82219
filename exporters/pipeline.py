"""The steps of an export, in order."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from .._garbage import collection_paused
from ..backends.contract.manifest import (
    CHAT_TEMPLATE_NAME,
    MANIFEST_NAME,
    SCHEMA_VERSION,
    TOKENIZER_NAME,
    Architecture,
    KVCacheSpec,
    Manifest,
    Source,
    TokenizerSpec,
    Verification,
    write_manifest,
)
from .architectures import build_model
from .architectures.model import Model
from .checkpoint import Checkpoint, open_checkpoint, weight_paths
from .errors import CheckpointError, PackageError
from .generation import read_generation_defaults
from .package import default_cache_dir, entry_name, source_of
from .package_folder import file_table, is_reusable, new_package, one_export_at_a_time, write_graph
from .stamp import write_stamp

Progress = Callable[[str, float], None]
_FLOAT_DTYPES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_EXTRA_KEYS: Final = ("general.license", "general.architecture", "general.file_type", "general.quantization_version")


def run_export(
    path: Path,
    out_dir: Path | None,
    *,
    verify: bool,
    tokenizer_pre: str | None,
    cache_dir: Path | None,
    progress: Progress,
) -> Path:
    """See exporters.export."""
    path = path.expanduser()
    paths = weight_paths(path)
    _check_names([path, *paths])
    sources = [source_of(p) for p in paths]
    source_dir = paths[0].parent
    if out_dir is None:
        target = (cache_dir or default_cache_dir()) / entry_name(path, source_dir, sources, tokenizer_pre)
        if is_reusable(target, source_dir, sources, verify):
            write_stamp(target, path, paths, verified=verify, tokenizer_pre=tokenizer_pre)
            return target
    else:
        target = Path(os.path.abspath(out_dir.expanduser()))
        _check_out_dir(target, source_dir)
    with one_export_at_a_time(paths[0], target):
        if out_dir is None and is_reusable(target, source_dir, sources, verify):
            return target  # another process was faster
        with open_checkpoint(path) as checkpoint:
            _check_unchanged(checkpoint, sources)
            progress("reading the checkpoint", 0.0)
            model = build_model(checkpoint)
            with new_package(target) as folder, collection_paused():
                try:
                    _write_package(folder, checkpoint, model, sources, verify, tokenizer_pre, progress)
                except Exception:
                    _check_not_replaced(paths, sources)  # no defect of ours: the proof runs the graph on the new file
                    raise
                _check_not_replaced(paths, sources)
    progress("done", 1.0)
    return target


def _check_names(paths: list[Path]) -> None:
    """Graph and manifest name the weight files in UTF-8."""
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            shown = os.fsencode(path).decode(errors="backslashreplace")
            raise CheckpointError(f"{shown}: the path is not valid UTF-8; rename the file or folder") from None


def _check_out_dir(target: Path, source_dir: Path) -> None:
    """Only a package may be overwritten: never a folder that holds anything else."""
    if target == source_dir:
        raise PackageError(f"{target} is the checkpoint's own folder; choose another for the package")
    if target.is_dir() and any(target.iterdir()) and not (target / MANIFEST_NAME).is_file():
        raise PackageError(f"{target} exists and holds no {MANIFEST_NAME}: not overwritten; choose another folder")
    if target.exists() and not target.is_dir():
        raise PackageError(f"{target} is a file, expected a folder for the package")


def _check_unchanged(checkpoint: Checkpoint, sources: list[Source]) -> None:
    for file, source in zip(checkpoint.files, sources, strict=True):
        if (file.size, file.mtime_ns) != (source.size_bytes, source.mtime_ns):
            raise _changed(file.path)


def _check_not_replaced(paths: list[Path], sources: list[Source]) -> None:
    """The checkpoint is read through maps, which keep a replaced file; the graph names its path."""
    for path, source in zip(paths, sources, strict=True):
        try:
            status = path.stat()
        except OSError:
            raise _changed(path) from None
        if (status.st_size, status.st_mtime_ns) != (source.size_bytes, source.mtime_ns):
            raise _changed(path)


def _changed(path: Path) -> PackageError:
    return PackageError(f"{path}: the file changed during the export; try again when it is complete")


def _write_package(
    folder: Path,
    checkpoint: Checkpoint,
    model: Model,
    sources: list[Source],
    verify: bool,
    tokenizer_pre: str | None,
    progress: Progress,
) -> None:
    from .. import __version__
    from .graph import build_graph

    progress("building the graph", 0.05)
    write_graph(build_graph(model, checkpoint.name, __version__), folder)
    progress("building the tokenizer", 0.1)
    tokenizer = _write_tokenizer(folder, checkpoint, tokenizer_pre)
    generation, without_effect = read_generation_defaults(checkpoint)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        trivet_version=__version__,
        source_dir=str(checkpoint.source_dir),
        sources=sources,
        architecture=_architecture(checkpoint, model),
        kv_cache=_kv_cache(model),
        tokenizer=tokenizer,
        generation=generation,
        verification=Verification(performed=False),
        generation_keys_without_effect=without_effect,
        extra=_extra(folder, checkpoint, model),
    )
    write_manifest(manifest, folder)
    if verify:
        from .verify import verified

        write_manifest(verified(folder, manifest, model, progress), folder)


def _write_tokenizer(folder: Path, checkpoint: Checkpoint, tokenizer_pre: str | None) -> TokenizerSpec:
    from .tokenizer import build_tokenizer
    from .tokenizer.byte_pairs import write_byte_pairs

    built = build_tokenizer(checkpoint, pre_override=tokenizer_pre)
    serialised = built.tokenizer.to_str()
    (folder / TOKENIZER_NAME).write_text(serialised, encoding="utf-8", newline="")
    write_byte_pairs(serialised, folder)
    if built.chat_template is not None:
        (folder / CHAT_TEMPLATE_NAME).write_text(built.chat_template, encoding="utf-8")
    return built.spec


def _architecture(checkpoint: Checkpoint, model: Model) -> Architecture:
    formats = Counter(tensor.format for tensor in model.tensors.values())
    matrices = {tensor.format for tensor in model.tensors.values() if len(tensor.shape) > 1}
    if not matrices <= set(_FLOAT_DTYPES):
        dtype = "quantized"
    else:  # of a mixture, the widest
        dtype = next(_FLOAT_DTYPES[name] for name in ("f32", "bf16", "f16") if name in matrices)
    return Architecture(
        family=model.family,
        name=checkpoint.name,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=len(model.layers),
        num_attention_heads=model.layers[0].attention.num_heads,
        max_position_embeddings=model.max_position_embeddings,
        weight_formats=dict(sorted(formats.items())),
        dtype=dtype,
        num_parameters=sum(tensor.num_elements for tensor in model.tensors.values()),
    )


def _kv_cache(model: Model) -> list[KVCacheSpec]:
    specs: list[KVCacheSpec] = []
    offset = 0
    for index, layer in enumerate(model.layers):
        attention = layer.attention
        specs.append(
            KVCacheSpec(
                layer=index,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                kv_offset=offset,
                sliding_window=attention.sliding_window,
            )
        )
        offset += 2 * attention.num_kv_heads * attention.head_dim
    return specs


def _extra(folder: Path, checkpoint: Checkpoint, model: Model) -> dict[str, Any]:
    extra: dict[str, Any] = {"files": file_table(folder), "checkpoint": checkpoint.kind}
    extra.update({key: checkpoint.metadata[key] for key in _EXTRA_KEYS if key in checkpoint.metadata})
    if model.unread_config:  # so that nothing of config.json is dropped without a trace
        extra["config_keys_without_effect"] = list(model.unread_config)
    return extra
