"""Write the tiny models of tiny_checkpoints.py as safetensors directories and GGUF files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tiny_tokenizers import CHATML, Vocabulary, byte_level_bpe, sentencepiece_bpe, write_tokenizer_json

if TYPE_CHECKING:
    from tiny_checkpoints import Tiny

GGUF_TYPES = {
    name: getattr(gguf.GGMLQuantizationType, name.upper())
    for name in ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
}
SPM_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
HF_CLASS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
GGUF_NAMES = {  # Hugging Face -> GGUF, inside a layer
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
GLOBAL_EVERY = 6  # of Gemma 3's layers


def random_blocks(
    weight_type: str, shape: tuple[int, ...], std: float, random: np.random.RandomState
) -> NDArray[np.uint8]:
    """Random K-quant rows for a matrix of `shape` whose values have about that standard deviation and mean 0."""
    rows, columns = shape
    blocks = rows * columns // 256
    size = {"q4_k": 144, "q5_k": 176, "q6_k": 210}[weight_type]
    data = random.randint(0, 256, (blocks, size)).astype(np.uint8)
    if weight_type == "q6_k":  # d * int8 scale * (q - 32), d last
        data[:, -2:] = np.full((blocks, 1), std / (73.9 * 18.5), np.float16).view(np.uint8)
    else:  # d * scale * q - dmin * min, with 6-bit scales and mins: d and dmin first
        middle = 7.5 if weight_type == "q4_k" else 15.5
        unit = std / (middle * 34.0)
        data[:, :4] = np.tile(np.array([unit, unit * middle], np.float16).view(np.uint8), (blocks, 1))
    return data.reshape(rows, -1)


def vocabulary_of(model: Tiny) -> Vocabulary:
    spm = model.tokenizer_pre in ("default", "no-prefix")
    return sentencepiece_bpe(model.vocab_size) if spm else byte_level_bpe(model.vocab_size)


def chat_template_of(model: Tiny, vocabulary: Vocabulary) -> str | None:
    if not model.chat:
        return None
    return SPM_CHAT if vocabulary.kind == "spm" else CHATML


def hf_config(model: Tiny, dtype: str) -> dict[str, Any]:
    """config.json."""
    vocabulary = vocabulary_of(model)
    model_type, class_name = HF_CLASS[model.family]
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tied,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
        "initializer_range": 0.2,
        "use_cache": True,
    }
    return config | _dtype_and_rope(model, dtype) | _family_config(model)


def _dtype_and_rope(model: Tiny, dtype: str) -> dict[str, Any]:
    dtype_name = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype]
    if model.new_style_config:
        return {
            "dtype": dtype_name,
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
            "layer_types": ["full_attention"] * model.num_hidden_layers,
        }
    return {"torch_dtype": dtype_name, "rope_theta": model.rope_theta, "rope_scaling": model.rope_scaling}


def _family_config(model: Tiny) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if model.family == "gemma3":
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": model.head_dim,
            "rope_local_base_freq": 10000.0,
            "sliding_window": model.sliding_window,
            "sliding_window_pattern": GLOBAL_EVERY,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        }
    else:
        config["hidden_act"] = "silu"
    if model.family == "mistral":
        config["sliding_window"] = model.sliding_window
    if model.family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": model.num_hidden_layers}
    if model.family in ("llama", "qwen3", "gemma3"):
        config["attention_bias"] = False
    if model.family == "llama":
        config["mlp_bias"] = False
    return config


def write_safetensors_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """name -> (safetensors dtype, shape, little-endian bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def write_safetensors(model: Tiny, weights: dict[str, NDArray[Any]], dtype: str, folder: Path, *, shards: int) -> None:
    """A Hugging Face directory. `weights`: matrices as rows of `dtype`, vectors as float32 (stored as float32)."""
    tensors = {}
    for name, values in weights.items():
        kind, itemsize = (dtype.upper(), {"f32": 4, "f16": 2, "bf16": 2}[dtype]) if values.ndim > 1 else ("F32", 4)
        shape = (*values.shape[:-1], values.shape[-1] * values.itemsize // itemsize)
        tensors[name] = (kind, shape, values.tobytes())
    if shards == 1:
        write_safetensors_file(folder / "model.safetensors", tensors)
    else:
        weight_map = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
        for file in sorted(set(weight_map.values())):
            write_safetensors_file(folder / file, {n: t for n, t in tensors.items() if weight_map[n] == file})
        total = sum(len(data) for _, _, data in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(hf_config(model, dtype), indent=1))
    vocabulary = vocabulary_of(model)
    generation = {"bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.eos}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    template = chat_template_of(model, vocabulary)
    write_tokenizer_json(vocabulary, folder, pre=model.tokenizer_pre, chat_template=template)


def gguf_name(model: Tiny, name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, leaf = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{leaf}"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    assert found
    names = GGUF_NAMES | (
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
        if model.family == "gemma3"
        else {"post_attention_layernorm": "ffn_norm"}
    )
    return f"blk.{found[1]}.{names[found[2]]}.{leaf}"


def interleave_heads(values: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of each head from Hugging Face's order (i, i + half) to the llama GGUF's (2i, 2i + 1)."""
    rows = values.shape[0]
    grouped = values.reshape(num_heads, 2, rows // num_heads // 2, *values.shape[1:])
    return grouped.swapaxes(1, 2).reshape(values.shape)


def llama3_rope_factors(model: Tiny) -> NDArray[np.float32]:
    """What each frequency of Llama 3's rope is divided by (the tensor rope_freqs.weight)."""
    scaling = model.rope_scaling
    assert scaling and scaling["rope_type"] == "llama3"
    factors = []
    for i in range(0, model.head_dim, 2):
        wavelength = 2 * math.pi * model.rope_theta ** (i / model.head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / ((1.0 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def _add_metadata(writer: gguf.GGUFWriter, model: Tiny) -> None:
    writer.add_name(f"tiny {model.name}")
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_hidden_layers)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.num_key_value_heads)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_rope_dimension_count(model.head_dim)
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    if model.sliding_window:
        writer.add_sliding_window(model.sliding_window)


def _add_tokenizer(writer: gguf.GGUFWriter, model: Tiny) -> None:
    vocabulary = vocabulary_of(model)
    spm = vocabulary.kind == "spm"
    types = [gguf.TokenType.NORMAL] * len(vocabulary.tokens)
    for i in vocabulary.specials:
        types[i] = gguf.TokenType.CONTROL
    if spm:
        types[0] = gguf.TokenType.UNKNOWN
        types[3:259] = [gguf.TokenType.BYTE] * 256
    writer.add_tokenizer_model("llama" if spm else "gpt2")
    writer.add_tokenizer_pre("default" if spm else model.tokenizer_pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(types)
    if spm:
        writer.add_token_scores(list(vocabulary.scores))
        writer.add_add_space_prefix(model.tokenizer_pre == "default")
        writer.add_unk_token_id(0)
    else:
        writer.add_token_merges([f"{a} {b}" for a, b in vocabulary.merges])
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    writer.add_add_bos_token(spm)
    template = chat_template_of(model, vocabulary)
    if template:
        writer.add_chat_template(template)


def write_gguf(model: Tiny, weights: dict[str, NDArray[Any]], weight_type: str, path: Path) -> None:
    """A GGUF file. `weights`: matrices as rows of `weight_type`, vectors as float32."""
    writer = gguf.GGUFWriter(path, model.architecture)
    _add_metadata(writer, model)
    _add_tokenizer(writer, model)
    heads = {"q_proj": model.num_attention_heads, "k_proj": model.num_key_value_heads}
    for name, values in weights.items():
        projection = name.split(".")[-2]
        if model.architecture == "llama" and projection in heads:
            values = interleave_heads(values, heads[projection])
        if model.family == "gemma3" and values.ndim == 1:
            values = values + np.float32(1.0)
        kind = GGUF_TYPES[weight_type] if values.ndim > 1 else GGUF_TYPES["f32"]
        writer.add_tensor(gguf_name(model, name), np.ascontiguousarray(values), raw_dtype=kind)
    if model.rope_scaling:
        writer.add_tensor("rope_freqs.weight", llama3_rope_factors(model), raw_dtype=GGUF_TYPES["f32"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
