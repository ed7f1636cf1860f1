"""Reads the llama2.c checkpoint format (its first version): a header of seven integers, then float32 weights.

Small trained Llama models exist in it. It does not know the decoder. The tokenizer is a file beside the checkpoint: tokV.bin for
a vocabulary of V tokens, or tokenizer.bin.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import torch

from harness.errors import UserError
from harness.model.architecture import Architecture, LayerFacts, Rope
from harness.model.gguf import into_halves
from harness.model.gguf_tokenizer import CONTROL, tokenizer_from_gguf
from harness.model.hashing import sha256_of
from harness.model.tokenizer import FastTokenizer
from harness.model.weights import Checkpoint

HEADER = struct.Struct("<7i")  # dim, hidden, layers, heads, kv_heads, vocab (negative: an output projection of its own), context
UNKNOWN, BOS, EOS = 0, 1, 2


def checkpoint_from_llama2c(path: Path) -> Checkpoint:
    """The checkpoint in a llama2.c file. UserError if its size is not what its header says."""
    data = np.fromfile(path, dtype=np.uint8)
    if data.size < HEADER.size:
        raise UserError(f"{path} is not a llama2.c checkpoint: it has {data.size} bytes and its header alone takes {HEADER.size}")
    architecture = _architecture(*HEADER.unpack(data[: HEADER.size].tobytes()), path)
    layout = _layout(architecture)
    expected = HEADER.size + 4 * sum(math.prod(shape) for _, shape in layout)
    if data.size != expected:
        raise UserError(f"{path} is not a whole llama2.c checkpoint: its header asks for {expected} bytes and it has {data.size}")
    tensors = _tensors(data[HEADER.size :].view(np.float32), layout, architecture)
    return Checkpoint(path.stem, sha256_of([path]), architecture, tensors.__getitem__, norm_offset=0.0)


def _architecture(dim: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int, path: Path) -> Architecture:
    if min(dim, hidden, layers, heads, kv_heads, abs(vocab), context) < 1 or dim % heads or max(dim, hidden, layers, context) > 1 << 24:
        raise UserError(f"{path} is not a llama2.c checkpoint of the first version: its header has impossible sizes")
    head_dim = dim // heads
    layer = LayerFacts(None, Rope(10_000.0, head_dim))
    return Architecture(
        family="llama",
        vocab=abs(vocab),
        hidden=dim,
        intermediate=hidden,
        layers=(layer,) * layers,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        norm_eps=1e-5,
        activation="silu",
        scale=head_dim**-0.5,
        tied=vocab > 0,
    )


def _layout(a: Architecture) -> list[tuple[str, tuple[int, ...]]]:
    """Tensors in file order; a name with {} holds all layers, one after another."""
    count, kv = len(a.layers), a.kv_heads * a.head_dim
    rope_table = (a.context, a.head_dim // 2)  # cos, then sin: recomputed here, so only stepped over
    layout = [
        ("model.embed_tokens.weight", (a.vocab, a.hidden)),
        ("model.layers.{}.input_layernorm.weight", (count, a.hidden)),
        ("model.layers.{}.self_attn.q_proj.weight", (count, a.hidden, a.hidden)),
        ("model.layers.{}.self_attn.k_proj.weight", (count, kv, a.hidden)),
        ("model.layers.{}.self_attn.v_proj.weight", (count, kv, a.hidden)),
        ("model.layers.{}.self_attn.o_proj.weight", (count, a.hidden, a.hidden)),
        ("model.layers.{}.post_attention_layernorm.weight", (count, a.hidden)),
        ("model.layers.{}.mlp.gate_proj.weight", (count, a.intermediate, a.hidden)),
        ("model.layers.{}.mlp.down_proj.weight", (count, a.hidden, a.intermediate)),
        ("model.layers.{}.mlp.up_proj.weight", (count, a.intermediate, a.hidden)),
        ("model.norm.weight", (a.hidden,)),
        ("cos", rope_table),
        ("sin", rope_table),
    ]
    return layout if a.tied else [*layout, ("lm_head.weight", (a.vocab, a.hidden))]


def _tensors(values: np.ndarray, layout: list[tuple[str, tuple[int, ...]]], a: Architecture) -> dict[str, torch.Tensor]:
    tensors, at = {}, 0
    for name, shape in layout:
        array = values[at : at + math.prod(shape)].reshape(shape)
        at += array.size
        layers = [(name, array)] if "{}" not in name else [(name.format(index), part) for index, part in enumerate(array)]
        tensors.update({full: torch.from_numpy(_paired_by_halves(full, part, a).copy()) for full, part in layers})
    return tensors


def _paired_by_halves(name: str, array: np.ndarray, a: Architecture) -> np.ndarray:
    """The format rotates lanes (2i, 2i+1); the decoder rotates (i, i + D/2)."""
    if ".q_proj." in name:
        return into_halves(array, a.query_heads)
    return into_halves(array, a.kv_heads) if ".k_proj." in name else array


def tokenizer_from_llama2c(checkpoint: Path, vocab: int) -> FastTokenizer:
    """The tokenizer beside `checkpoint`. UserError if there is none, or it is too short for `vocab` tokens."""
    candidates = [checkpoint.with_name(f"tok{vocab}.bin"), checkpoint.with_name("tokenizer.bin")]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise UserError(f"{checkpoint} has no tokenizer beside it: put {candidates[0].name} or {candidates[1].name} into its folder")
    try:
        tokens, scores = _vocabulary(path.read_bytes(), vocab)
    except struct.error:
        raise UserError(f"{path} is not a llama2.c tokenizer of {vocab} tokens: it ends too early") from None
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [CONTROL if index in (UNKNOWN, BOS, EOS) else 1 for index in range(vocab)],
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": BOS,  # these models are trained on texts that are only ever separated by BOS
    }
    return tokenizer_from_gguf(metadata, str(path))


def _vocabulary(data: bytes, vocab: int) -> tuple[list[str], list[float]]:
    """Per token: float32 score, int32 length, then its bytes; the first integer of the file is the longest length."""
    tokens, scores, at = [], [], 4
    for index in range(vocab):
        score, size = struct.unpack_from("<fi", data, at)
        at += 8
        if size < 0 or at + size > len(data):
            raise struct.error("a token ends past the file")
        text = data[at : at + size].decode("utf-8", errors="replace")
        at += size
        control = {UNKNOWN: "<unk>", BOS: "<s>", EOS: "</s>"}.get(index)  # stored with line breaks around them
        tokens.append(text.replace(" ", "\u2581") if control is None else control)
        scores.append(score)
    return tokens, scores
