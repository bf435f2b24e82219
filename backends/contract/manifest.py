"""The manifest `trivet.json` of a model package: everything the runtime knows about a model.

A package folder holds `model.onnx` (graph and small tensors), `trivet.json`, `tokenizer.json`, for byte-level BPE
`byte_pairs.bin`, and, if the checkpoint has one, `chat_template.jinja`. Weights stay in the checkpoint files named in
`sources`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from .opset import KvDtype

SCHEMA_VERSION = 2  # raise it when packages of before cannot be read, or their graphs not run
MANIFEST_NAME = "trivet.json"
GRAPH_NAME = "model.onnx"
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint file that the graph's external data points into."""

    name: str  # file name, relative to Manifest.source_dir
    size_bytes: int
    mtime_ns: int
    digest: str  # sha256 of size, the first 16 MiB (header, tensor table) and spread samples, hex


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one attention layer keeps per token."""

    layer: int
    num_kv_heads: int
    head_dim: int
    kv_offset: int  # elements per token held by the layers before (see contract/opset.py, KV layout)
    sliding_window: int = 0  # 0 = full attention

    def bytes_per_token(self, dtype: KvDtype) -> int:
        """K and V of one token in this layer."""
        return 2 * self.num_kv_heads * dtype.vector_bytes(self.head_dim)


class Architecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts for display and checks; the runtime never branches on `family`."""

    family: str  # "llama", "qwen2", "qwen3", "gemma3"
    name: str  # human name of the model (general.name, or the folder's)
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int  # tokens; the longest context the model was made for
    weight_formats: dict[str, int]  # format name -> number of tensors
    dtype: str  # "float32" | "float16" | "bfloat16" for unquantised checkpoints, "quantized" otherwise
    num_parameters: int


class TokenizerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bos_token_id: int | None = None
    eos_token_ids: list[int] = []  # generation stops at any of these
    pad_token_id: int | None = None
    add_bos: bool = False  # encode() of a plain prompt puts bos in front
    add_eos: bool = False
    bos_token: str = ""
    eos_token: str = ""
    longest_token_bytes: int = 1  # of the whole vocabulary; bounds prompt bytes before tokenisation
    chat_templates: dict[str, str] = {}  # named templates besides the default one


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From generation_config.json, GGUF metadata or the catalogue; None = the runtime's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


class Verification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcome of the export-time comparison with a NumPy evaluation of the checkpoint."""

    performed: bool
    num_tokens: int = 0
    max_relative_error: float | None = None  # max over rows of |ours - reference|_2 / |reference|_2 of the logits
    tolerance: float | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: int
    trivet_version: str
    source_dir: str  # absolute real path of the folder of the checkpoint files
    sources: list[Source]
    architecture: Architecture
    kv_cache: list[KVCacheSpec]
    tokenizer: TokenizerSpec
    generation: GenerationDefaults
    verification: Verification
    generation_keys_without_effect: list[str] = []  # of the checkpoint: they would change answers, if trivet had them
    extra: dict[str, Any] = {}  # facts nobody needs at run time (general.license, ...)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of the KV cache per token, all layers."""
        return sum(2 * s.num_kv_heads * s.head_dim for s in self.kv_cache)


def read_manifest(package_dir: Path) -> Manifest:
    """Read and validate `trivet.json`; msgspec.ValidationError or ValueError on a wrong or newer schema."""
    raw = (package_dir / MANIFEST_NAME).read_bytes()
    document = msgspec.json.decode(raw)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{package_dir / MANIFEST_NAME}: schema_version {version}, this trivet reads {SCHEMA_VERSION}")
    return msgspec.json.decode(raw, type=Manifest)


def write_manifest(manifest: Manifest, package_dir: Path) -> None:
    (package_dir / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
