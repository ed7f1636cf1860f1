"""What a backend needs to compute everything between two attentions of a decode step as one call. It computes nothing itself.

It does not know how the backend does it, or whether it can (`Ops.chained` says).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin [T, R] float32


class LayerTensors(Protocol):
    """One layer's weights, as the decoder holds them; biases may be None."""

    input_norm: torch.Tensor  # [E] float32
    qkv: torch.Tensor  # [(Hq + 2 Hkv) D, E]
    qkv_bias: torch.Tensor | None
    output: torch.Tensor  # [E, Hq D]
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [E] float32
    gate_up: torch.Tensor  # [2F, E]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [E, F]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class ChainModel:
    """All weights and what else decides the numbers."""

    layers: Sequence[LayerTensors]
    final_norm: torch.Tensor  # [E] float32
    head: torch.Tensor  # [V, E]
    eps: float
    activation: str
    query_heads: int
    kv_heads: int
    head_dim: int


class Program(Protocol):
    """Ops that run as one call."""

    names: list[str]

    def run(self) -> None: ...

    def ticks(self) -> Counter[str]:
        """Time stamps of each op since the last time this was asked."""


class Chain(Protocol):
    """A decode step of T rows. It owns its working rows, so one step at a time."""

    rows: torch.Tensor  # [T, E] the embedded tokens go here
    run: Callable[[Program], None]  # runs a program; a profile puts its own in this place

    def first(self, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D] of the first layer, from `rows`."""

    def between(self, layer: int, o: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of `layer`, from what the layer before it attended, o [T, Hq, D]."""

    def last(self, o: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] in the working dtype, from what the last layer attended."""

    def calls(self) -> Counter[str]:
        """Ops that one step runs."""
