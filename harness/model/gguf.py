"""Reads a GGUF file: its metadata, its tensors (dequantised by the `gguf` package) and its architecture's facts.

The header is parsed here in one pass, because the package's own reader spends seconds on the vocabulary. It does not know the
decoder.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.errors import UserError
from harness.model.architecture import FAMILIES
from harness.model.gguf_config import from_gguf
from harness.model.hashing import sha256_of
from harness.model.weights import Checkpoint

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in the file and what it looks like; `shape` is in torch's order (rows first)."""

    shape: tuple[int, ...]
    kind: int  # gguf.GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class GgufFile:
    """An open GGUF file."""

    path: Path
    metadata: dict[str, Any]
    entries: dict[str, TensorEntry]
    data: np.ndarray  # the whole file as bytes, mapped

    def array(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32. KeyError if there is none of that name."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        entry = self.entries[name]
        kind = GGMLQuantizationType(entry.kind)
        raw = self.data[entry.start : entry.start + entry.nbytes]
        if kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(entry.shape).copy()
        if kind == GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(entry.shape).astype(np.float32)
        return dequantize(raw.reshape(quant_shape_to_byte_shape(entry.shape, kind)), kind)


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.buffer, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        if self.at + size > len(self.buffer):
            raise struct.error("a string ends past the file")
        text = self.buffer[self.at : self.at + size]
        self.at += size
        return text.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        return self.scalar(SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind not in SCALARS:
            return [self.value(kind) for _ in range(count)]
        code = f"<{count}{SCALARS[kind][1]}"
        values = list(struct.unpack_from(code, self.buffer, self.at))
        self.at += struct.calcsize(code)
        return values


def open_gguf(path: Path) -> GgufFile:
    """Map the file and read its header. UserError if it is no GGUF file, or ends before its last tensor does."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise UserError(f"{path} is not a GGUF file (it does not start with 'GGUF'): give a .gguf file, or a folder of safetensors")
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        metadata, entries = _header(_Cursor(buffer), path)
    except (struct.error, KeyError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} is truncated or damaged: its header cannot be read to the end ({error}); fetch the file again") from None
    end = max((entry.start + entry.nbytes for entry in entries.values()), default=0)
    if end > size:
        raise UserError(f"{path} is truncated: its tensors need {end} bytes and it has {size}; fetch the file again")
    return GgufFile(path, metadata, entries, np.frombuffer(buffer, dtype=np.uint8))


def _header(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    cursor.at = len(MAGIC)
    version = cursor.scalar("<I")
    if version not in VERSIONS:
        raise UserError(f"{path} is GGUF version {version}, which is not supported: supported are {', '.join(map(str, VERSIONS))}")
    tensors, pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {}
    for _ in range(pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    infos = [_info(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    base = -(-cursor.at // alignment) * alignment
    return metadata, {name: _entry(path, name, dims, kind, base + offset) for name, dims, kind, offset in infos}


def _info(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    name = cursor.string()
    dims = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
    return name, dims, cursor.scalar("<I"), cursor.scalar("<Q")


def _entry(path: Path, name: str, dims: list[int], kind: int, start: int) -> TensorEntry:
    from gguf.constants import GGML_QUANT_SIZES

    if kind not in GGML_QUANT_SIZES:
        raise UserError(f"{path}: tensor {name} has the unknown quantisation type {kind}: a newer gguf package may know it")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    values = int(np.prod(dims, dtype=np.int64))
    return TensorEntry(tuple(reversed(dims)), kind, start, values // block * block_bytes)


def checkpoint_from_gguf(file: GgufFile, name: str) -> Checkpoint:
    """The checkpoint in an open GGUF file. UserError for an unsupported architecture."""
    factors = file.array("rope_freqs.weight") if "rope_freqs.weight" in file.entries else None
    architecture = from_gguf(file.metadata, str(file.path), "output.weight" not in file.entries, factors)
    read = _reader(file, architecture.query_heads, architecture.kv_heads, FAMILIES[architecture.family].interleaved_in_gguf)
    return Checkpoint(name, sha256_of([file.path]), architecture, read, norm_offset=0.0)


def _reader(file: GgufFile, query_heads: int, kv_heads: int, interleaved: bool) -> Callable[[str], torch.Tensor]:
    names = {_hugging_face_name(name, file.entries): name for name in file.entries}

    def read(name: str) -> torch.Tensor:
        array = file.array(names[name])
        if interleaved and ".q_proj." in name:
            array = into_halves(array, query_heads)
        if interleaved and ".k_proj." in name:
            array = into_halves(array, kv_heads)  # K has its own head count: with that of Q every shared-head model is scrambled
        return torch.from_numpy(np.ascontiguousarray(array))

    return read


def into_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection [heads * D, ...] with rotary lanes paired (2i, 2i+1), reordered to pair (i, i + D/2)."""
    paired = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return paired.swapaxes(1, 2).reshape(array.shape)


def _hugging_face_name(name: str, entries: dict[str, TensorEntry]) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)\.(weight|bias)", name)
    if layer is None:
        stem, _, leaf = name.rpartition(".")
        return f"{NAMES.get(stem, stem)}.{leaf}"
    index, stem, leaf = layer.groups()
    if stem == "ffn_norm" and f"blk.{index}.post_attention_norm.weight" in entries:
        return f"model.layers.{index}.pre_feedforward_layernorm.{leaf}"
    return f"model.layers.{index}.{NAMES.get(stem, stem)}.{leaf}"
