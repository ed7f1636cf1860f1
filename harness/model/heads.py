"""Gives a model another number of KV heads: fewer (shared), or one per query head (expanded).

It does not know why; a strategy's `HeadSharing` says how many and how. Sharing follows GQA (Ainslie et al. 2023, section 2.1):
neighbouring KV heads are pooled, so that each query head keeps the group it was in. No up-training follows, and the label says so.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from harness.errors import UserError
from harness.model.architecture import Architecture
from harness.model.weights import LayerWeights, Weights
from strategies.geometry import HeadSharing

NATIVE, CONVERTED, EXPANDED = "native", "converted, not up-trained", "expanded"


def share_heads(architecture: Architecture, weights: Weights, heads: HeadSharing | None, seed: int) -> tuple[Architecture, Weights, str]:
    """The model with `heads.kv_heads` KV heads in every layer, and a label: native, converted or expanded.

    heads None, or the checkpoint's own number, changes nothing. Expanding repeats heads and keeps every answer. UserError when the
    numbers do not divide.
    """
    if heads is not None and heads.kv_heads is None:
        heads = replace(heads, kv_heads=architecture.query_heads)
    if heads is None or heads.kv_heads == architecture.kv_heads:
        return architecture, weights, NATIVE
    _check(architecture, heads.kv_heads)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    layers = tuple(_converted(layer, architecture, heads, generator) for layer in weights.layers)
    label = CONVERTED if heads.kv_heads < architecture.kv_heads else EXPANDED
    return architecture.with_kv_heads(heads.kv_heads), replace(weights, layers=layers), label


def _check(architecture: Architecture, kv_heads: int) -> None:
    own, queries = architecture.kv_heads, architecture.query_heads
    if kv_heads < own and own % kv_heads:
        raise UserError(f"heads.kv_heads={kv_heads} does not divide the checkpoint's {own} KV heads: use a divisor of {own}")
    if kv_heads > own and (kv_heads % own or queries % kv_heads):
        raise UserError(
            f"heads.kv_heads={kv_heads} cannot expand the checkpoint's {own} KV heads for {queries} query heads: "
            f"use a multiple of {own} that divides {queries}"
        )


def _converted(layer: LayerWeights, architecture: Architecture, heads: HeadSharing, generator: torch.Generator) -> LayerWeights:
    qkv = _reheaded(layer.qkv, architecture, heads, generator)
    bias = None if layer.qkv_bias is None else _reheaded(layer.qkv_bias, architecture, heads, generator)
    return replace(layer, qkv=qkv, qkv_bias=bias)


def _reheaded(qkv: torch.Tensor, architecture: Architecture, heads: HeadSharing, generator: torch.Generator) -> torch.Tensor:
    """Stacked q, k, v rows [(Hq + 2 Hkv) D, ...] with the k and v heads replaced."""
    a = architecture
    by_head = qkv.unflatten(0, (-1, a.head_dim))  # [Hq + 2 Hkv, D, ...]
    q, k, v = by_head.split((a.query_heads, a.kv_heads, a.kv_heads))
    k, v = (_pooled(x, heads, generator) if heads.kv_heads < a.kv_heads else _repeated(x, heads.kv_heads) for x in (k, v))
    return torch.cat((q, k, v)).flatten(0, 1)


def _repeated(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    return x.repeat_interleave(kv_heads // x.shape[0], dim=0)


def _pooled(x: torch.Tensor, heads: HeadSharing, generator: torch.Generator) -> torch.Tensor:
    """x [Hkv, D, ...] -> [heads.kv_heads, D, ...]."""
    groups = x.unflatten(0, (heads.kv_heads, -1))  # [kv_heads, group, D, ...]
    if heads.init == "first":
        return groups[:, 0]
    if heads.init == "mean":
        return groups.to(torch.float64).mean(dim=1).to(x.dtype)
    spread = x.to(torch.float64).std().item()
    fresh = torch.randn(groups[:, 0].shape, generator=generator, dtype=torch.float32) * spread
    return fresh.to(x.device, x.dtype)
