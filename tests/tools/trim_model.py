#!/usr/bin/env python3
"""Cut a GGUF model down to its outer layers and the first tokens of its vocabulary, weights as they are.

    trim_model.py MODEL.gguf OUT.gguf [--layers 8] [--period 1] [--tokens 8192]

What it says means little, but real weights of real formats are multiplied, and the file is small enough to travel.
Layers are taken out of the middle, where a model misses them least; a half is rounded up to --period layers, for models
whose layers take turns (gemma3: 6).
Merges whose result is cut off go as well, so that the tokenizer still works.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import gguf

_PER_TOKEN = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
_VOCABULARY_TENSORS = ("token_embd.weight", "output.weight")
_WRITTEN = ("general.architecture", "general.alignment")  # by the writer itself, or not at all
_LAYER = re.compile(r"blk\.(\d+)\.")


def trimmed_fields(reader: gguf.GGUFReader, architecture: str, layers: int, tokens: int) -> dict[str, Any]:
    """Values by name."""
    values = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.") and n not in _WRITTEN}
    for name in _PER_TOKEN:
        if name in values:
            values[name] = values[name][:tokens]
    if "tokenizer.ggml.merges" in values:
        known = set(values["tokenizer.ggml.tokens"])
        values["tokenizer.ggml.merges"] = [m for m in values["tokenizer.ggml.merges"] if m.replace(" ", "", 1) in known]
    for name, value in values.items():
        if name.endswith("_token_id") and not 0 <= value < tokens:
            raise SystemExit(f"{name} is {value}: --tokens {tokens} cuts it off")
    values[f"{architecture}.block_count"] = layers
    if f"{architecture}.vocab_size" in values:
        values[f"{architecture}.vocab_size"] = tokens
    return values


def kept_layers(total: int, count: int, period: int) -> dict[int, int]:
    """New number by old number: the first ones and the last ones."""
    first = min(count, -(-(count // 2) // period) * period)
    kept = [*range(first), *range(total - (count - first), total)]
    return {old: new for new, old in enumerate(kept)}


def trim(source: Path, target: Path, layers: int, period: int, tokens: int) -> None:
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    total = reader.fields[f"{architecture}.block_count"].contents()
    if not 1 <= layers <= total:
        raise SystemExit(f"--layers {layers}: {source} has {total}")
    kept = kept_layers(total, layers, period)
    writer = gguf.GGUFWriter(target, architecture)
    for name, value in trimmed_fields(reader, architecture, layers, tokens).items():
        field = reader.fields[name]
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        name, layer = tensor.name, _LAYER.match(tensor.name)
        if layer is not None:
            if int(layer[1]) not in kept:
                continue
            name = f"blk.{kept[int(layer[1])]}.{name[layer.end() :]}"
        data = tensor.data[:tokens] if tensor.name in _VOCABULARY_TENSORS else tensor.data
        writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--period", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    trim(arguments.model, arguments.out, arguments.layers, arguments.period, arguments.tokens)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
