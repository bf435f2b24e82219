"""The tokenizer that the load on a server is made with."""

from __future__ import annotations

from pathlib import Path

from ..cli.errors import UsageError
from .datasets import PromptMaker, TokenIdPrompts, WordPrompts


def load_prompt_maker(reference: str | None, prompt_format: str, *, chat: bool) -> tuple[PromptMaker, str]:
    """The maker of prompts, and the format ("text" or "token-ids") that "auto" stands for."""
    if chat and prompt_format == "token-ids":
        raise UsageError("--prompt-format token-ids goes with --backend openai; a chat message is text")
    if reference is None:
        if prompt_format == "token-ids":
            raise UsageError("--prompt-format token-ids needs --tokenizer, to know the vocabulary")
        return WordPrompts(), "text"
    if prompt_format == "auto":
        prompt_format = "text" if chat else "token-ids"
    import tokenizers

    path = _tokenizer_file(reference)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise UsageError(f"--tokenizer {path} is not a tokenizer.json: {error}") from error
    maker = TokenIdPrompts(
        tokenizer.get_vocab_size(),
        lambda text: tokenizer.encode(text).ids,
        lambda ids: tokenizer.decode(ids),
        as_text=prompt_format == "text",
    )
    return maker, prompt_format


def _tokenizer_file(reference: str) -> Path:
    """tokenizer.json itself, in a folder, or in the package of a model."""
    path = Path(reference)
    if path.suffix == ".json" and path.is_file():
        return path
    if (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    from ...runtime.config import LoadConfig
    from ...runtime.model_loader import resolve_package

    package, _ = resolve_package(reference, LoadConfig())
    return package / "tokenizer.json"
