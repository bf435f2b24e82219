"""Generation defaults from generation_config.json, or from the `general.sampling.*` keys of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..backends.contract.manifest import GenerationDefaults
from .checkpoint.hf_config import ConfigReader
from .checkpoint.safetensors import read_json
from .checkpoint.tensors import Checkpoint

GENERATION_CONFIG_NAME: Final = "generation_config.json"
_GGUF_KEYS: Final = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# They change no answer, are read elsewhere (eos_token_id), give way to max_tokens (max_length), or only refine a key
# that is named itself.
_HARMLESS: Final = frozenset(
    """_commit_hash _from_model_config transformers_version bos_token_id eos_token_id pad_token_id
    decoder_start_token_id use_cache cache_config cache_implementation return_legacy_cache compile_config
    disable_compile low_memory return_dict_in_generate output_attentions output_hidden_states output_logits
    output_scores remove_invalid_values renormalize_logits is_assistant num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit assistant_lookbehind
    target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size num_beam_groups diversity_penalty
    early_stopping length_penalty max_length general.sampling.mirostat_eta general.sampling.mirostat_tau
    general.sampling.xtc_threshold""".split()
)
# Values without effect; so are null, false, 0 and what is empty.
_NEUTRAL: Final[dict[str, Any]] = {
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "typical_p": 1,
}


def read_generation_defaults(checkpoint: Checkpoint) -> tuple[GenerationDefaults, list[str]]:
    """What a checkpoint says about sampling, and its keys that would change answers, if trivet had them.

    Absent values stay None. ConfigError on a value that no sampler could use.
    """
    if checkpoint.kind == "gguf":
        return _read(ConfigReader(checkpoint.metadata, str(checkpoint.path), "general.sampling."), _GGUF_KEYS)
    return _read(ConfigReader(checkpoint.generation_config, str(checkpoint.path / GENERATION_CONFIG_NAME)), {})


def read_generation_folder(folder: Path, eos_token_ids: Sequence[int]) -> tuple[GenerationDefaults, list[str]]:
    """The same of a folder with generation_config.json, for a model that stops at `eos_token_ids`, its own eos first.

    CheckpointError where the file cannot be read, ConfigError for a value that cannot be used.
    """
    path = folder / GENERATION_CONFIG_NAME
    values = read_json(path)
    reader = ConfigReader(values, str(path))
    defaults, without_effect = _read(reader, {})
    if not _stops_alike(_token_ids(reader, "eos_token_id"), eos_token_ids):
        without_effect = sorted([*without_effect, "eos_token_id"])
    return defaults, without_effect


def _token_ids(reader: ConfigReader, name: str) -> list[int]:
    value = reader.raw(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise reader.fail(name, "a token id or a list of them")
    return ids


def _stops_alike(ids: Sequence[int], eos_token_ids: Sequence[int]) -> bool:
    """Whether `ids` add to the model's own eos what `eos_token_ids` adds to it."""
    if not ids:
        return True
    wanted = [*eos_token_ids[:1], *ids]
    return all(i in eos_token_ids for i in wanted) and all(i in wanted for i in eos_token_ids)


def _read(reader: ConfigReader, names: dict[str, str]) -> tuple[GenerationDefaults, list[str]]:
    """`names`: the reader's keys, where they are not those of generation_config.json."""

    def number(name: str, low: float, high: float) -> float | None:
        key = names.get(name, name)
        return reader.number(key, low=low, high=high) if reader.has(key) else None

    def integer(name: str, low: int, high: int) -> int | None:
        key = names.get(name, name)
        return reader.integer(key, low=low, high=high) if reader.has(key) else None

    top_k = integer("top_k", -1, 1 << 31)
    temperature = number("temperature", 0, 100)
    defaults = GenerationDefaults(
        temperature=temperature if reader.boolean("do_sample", True) else 0.0,
        top_p=number("top_p", 1e-9, 1),
        top_k=top_k if top_k is None or top_k > 0 else 0,
        min_p=number("min_p", 0, 1),
        repetition_penalty=number("repetition_penalty", 1e-6, 100),
        max_new_tokens=integer("max_new_tokens", 1, 1 << 31),
    )
    without_effect = [
        key
        for key in reader.unread()
        if key not in _HARMLESS and reader.values[key] and reader.values[key] != _NEUTRAL.get(key)
    ]
    if defaults.repetition_penalty in (None, 1):
        without_effect = [key for key in without_effect if key != "general.sampling.penalty_last_n"]
    return defaults, without_effect
