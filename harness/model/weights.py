"""A checkpoint's tensors under one set of names, and the fused weights that the decoder reads.

It does not know file formats (`gguf.py`, `safetensors.py`, `llama2c.py` and `random_init.py` each make a `Checkpoint`) nor how
the weights are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from harness.errors import UserError
from harness.model.architecture import Architecture


@dataclass(frozen=True)
class Checkpoint:
    """An opened source of weights. `tensor(name)` reads one, by the names of transformers' Llama models; KeyError if there is none."""

    name: str
    sha256: str
    architecture: Architecture
    tensor: Callable[[str], torch.Tensor]
    norm_offset: float  # add this to the norm weights read


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer: q, k, v rows stacked in that order, gate rows above up rows. What the architecture lacks is None."""

    input_norm: torch.Tensor  # [E]
    qkv: torch.Tensor  # [(Hq + 2 Hkv) D, E]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    output: torch.Tensor  # [E, Hq D]
    output_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor | None  # [E]
    mlp_norm: torch.Tensor  # [E]
    gate_up: torch.Tensor  # [2F, E]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [E, F]
    down_bias: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None  # [E]


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights: matrices in the working dtype, norm weights in float32 (float64 when that is the working dtype)."""

    embedding: torch.Tensor  # [V, E]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [E]
    head: torch.Tensor  # [V, E]; the embedding itself when tied


class _Reader:
    """Reads tensors of one checkpoint in the working dtype, and checks their shapes."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def matrix(self, name: str, *shape: int) -> torch.Tensor:
        return self._read(name, shape).to(self._device, self._dtype)

    def stacked(self, names: list[str], rows: list[int], width: int | None) -> torch.Tensor:
        """The tensors called `names` on top of each other; width None: biases."""
        shapes = [(count,) if width is None else (count, width) for count in rows]
        return torch.cat([self.matrix(name, *shape) for name, shape in zip(names, shapes, strict=True)])

    def norm(self, name: str, size: int) -> torch.Tensor:
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        return self._read(name, (size,)).to(self._device, wide) + self._checkpoint.norm_offset

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            tensor = self._checkpoint.tensor(name)
        except KeyError:
            raise UserError(
                f"{self._checkpoint.name} has no tensor {name}, which its architecture needs: the file is incomplete or of another kind"
            ) from None
        if tuple(tensor.shape) != shape:
            raise UserError(f"{self._checkpoint.name}: tensor {name} has shape {tuple(tensor.shape)}, but its config says {shape}")
        return tensor


def fuse(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> Weights:
    """Read a whole checkpoint into fused weights. UserError for a missing tensor or a shape that the config contradicts."""
    architecture = checkpoint.architecture
    read = _Reader(checkpoint, dtype, device)
    embedding = read.matrix("model.embed_tokens.weight", architecture.vocab, architecture.hidden)
    head = embedding if architecture.tied else read.matrix("lm_head.weight", architecture.vocab, architecture.hidden)
    layers = tuple(_layer(read, architecture, f"model.layers.{index}.") for index in range(len(architecture.layers)))
    return Weights(embedding, layers, read.norm("model.norm.weight", architecture.hidden), head)


def laid_out(weights: Weights) -> Weights:
    """The same values, the widest matrix of each layer stored column by column where a CPU multiplies faster so.

    A step of one token streams every matrix once. In float32 and float64 the CPU's library does that up to 1.9 times as fast
    over columns when a matrix has far more rows than columns, and loses a sixth of its speed at eight tokens; for the other
    matrices and dtypes the loss outweighs the gain, and a GPU does not care.
    """
    if weights.embedding.device.type != "cpu" or weights.embedding.dtype not in (torch.float32, torch.float64):
        return weights
    return replace(weights, layers=tuple(replace(layer, gate_up=_by_columns(layer.gate_up)) for layer in weights.layers))


def _by_columns(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.t().contiguous().t() if matrix.shape[0] > matrix.shape[1] else matrix


def _layer(read: _Reader, a: Architecture, prefix: str) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    projections = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
    rows = [a.query_heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim]
    gates = [mlp + "gate_proj", mlp + "up_proj"]
    halves = [a.intermediate, a.intermediate]
    before_mlp = "pre_feedforward_layernorm" if a.post_norms else "post_attention_layernorm"
    return LayerWeights(
        input_norm=read.norm(prefix + "input_layernorm.weight", a.hidden),
        qkv=read.stacked([name + ".weight" for name in projections], rows, a.hidden),
        qkv_bias=read.stacked([name + ".bias" for name in projections], rows, None) if a.qkv_bias else None,
        q_norm=read.norm(attention + "q_norm.weight", a.head_dim) if a.qk_norm else None,
        k_norm=read.norm(attention + "k_norm.weight", a.head_dim) if a.qk_norm else None,
        output=read.matrix(attention + "o_proj.weight", a.hidden, a.query_heads * a.head_dim),
        output_bias=read.matrix(attention + "o_proj.bias", a.hidden) if a.output_bias else None,
        post_attention_norm=read.norm(prefix + "post_attention_layernorm.weight", a.hidden) if a.post_norms else None,
        mlp_norm=read.norm(prefix + before_mlp + ".weight", a.hidden),
        gate_up=read.stacked([name + ".weight" for name in gates], halves, a.hidden),
        gate_up_bias=read.stacked([name + ".bias" for name in gates], halves, None) if a.mlp_bias else None,
        down=read.matrix(mlp + "down_proj.weight", a.hidden, a.intermediate),
        down_bias=read.matrix(mlp + "down_proj.bias", a.hidden) if a.mlp_bias else None,
        post_mlp_norm=read.norm(prefix + "post_feedforward_layernorm.weight", a.hidden) if a.post_norms else None,
    )
