"""Checkpoint -> model package. `export()` is the one entry point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

__all__ = ["export"]


def export(
    checkpoint: Path,
    out_dir: Path | None = None,
    *,
    verify: bool = True,
    tokenizer_pre: str | None = None,
    cache_dir: Path | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Path:
    """Make a model package from a .gguf file or a safetensors directory and return its folder.

    Without `out_dir` the package is an entry of the cache (`cache_dir`, or the user's), made only if no valid one is
    there. With `out_dir` it is always made; that folder must not exist, be empty, or hold an older package.
    `tokenizer_pre` overrides the pre-tokenizer name of a GGUF vocabulary. `progress(stage, fraction)` is told what
    happens. Raises ExportError (errors.py); the message is one line.
    """
    checkpoint = Path(checkpoint).expanduser()
    if out_dir is None:
        from .package import default_cache_dir
        from .stamp import find_stamped

        cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
        found = find_stamped(cache, checkpoint, verify=verify, tokenizer_pre=tokenizer_pre)
        if found is not None:
            return found
    from .pipeline import run_export

    return run_export(
        checkpoint,
        Path(out_dir) if out_dir is not None else None,
        verify=verify,
        tokenizer_pre=tokenizer_pre,
        cache_dir=Path(cache_dir) if cache_dir is not None else None,
        progress=progress or (lambda stage, fraction: None),
    )
