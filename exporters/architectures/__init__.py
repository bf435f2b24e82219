"""Model families: which module reads which architecture, and the one function that builds a Model."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from ..checkpoint.hf_config import ConfigReader
from ..checkpoint.tensors import Checkpoint
from ..errors import CheckpointError, UnsupportedError
from .model import Model

_FAMILIES: Final[dict[str, str]] = {  # config.json's model_type or GGUF's general.architecture -> module
    "llama": "llama",
    "mistral": "llama",  # config.json only
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",  # config.json only
    "gemma3": "gemma3",  # GGUF only: in config.json this is the model with a vision tower
}
_MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
_READ_ELSEWHERE: Final = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id")  # by us and by tokenizer/
_GGUF_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "gemma3")


def build_model(checkpoint: Checkpoint) -> Model:
    """Read config and tensor table into blocks. No weight is read but rope_freqs.weight.

    Raises UnsupportedError for an unknown architecture or option, ConfigError for a bad value, CheckpointError for
    a missing or misshapen tensor.
    """
    if checkpoint.kind == "gguf":
        return _from_gguf(checkpoint)
    return _from_config(checkpoint)


def _family(name: object, key: str, known: tuple[str, ...], checkpoint: Checkpoint) -> Any:
    if name is None:
        raise CheckpointError(f"{checkpoint.path}: {key} is missing, expected one of {', '.join(known)}")
    if name not in known:
        hint = "; this is the model with a vision tower, export its text model" if name == "gemma3" else ""
        raise UnsupportedError(
            f"{checkpoint.path}: {key} is {str(name)[:100]!r}, supported are {', '.join(known)}{hint}"
        )
    return import_module(f".{_FAMILIES[str(name)]}", __name__)


def _from_gguf(checkpoint: Checkpoint) -> Model:
    from .decoder import IGNORABLE, build
    from .tensor_table import TensorTable

    name = checkpoint.metadata.get("general.architecture")
    family = _family(name, "general.architecture", _GGUF_ARCHITECTURES, checkpoint)
    reader = ConfigReader(checkpoint.metadata, str(checkpoint.path), f"{name}.")
    table = TensorTable(checkpoint, family.TENSOR_NAMES, IGNORABLE)
    return build(family.from_gguf(reader, table), table, reader)


def _from_config(checkpoint: Checkpoint) -> Model:
    from .decoder import IGNORABLE, build
    from .tensor_table import TensorTable

    family = _family(checkpoint.config.get("model_type"), "model_type", _MODEL_TYPES, checkpoint)
    reader = ConfigReader(checkpoint.config, str(checkpoint.path / "config.json"))
    reader.read.update(_READ_ELSEWHERE)
    table = TensorTable(checkpoint, family.TENSOR_NAMES, IGNORABLE)
    return build(family.from_config(reader), table, reader)
