"""Rotary frequencies and their cos and sin tables, indexed by position.

Does not rotate anything: that is a kernel's work.
"""

from __future__ import annotations

import math

import torch

from harness.model.architecture import Divisors, Linear, Llama3, Rope

FIRST_ROWS = 1024


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """Radians a position turns each lane pair, [lanes / 2] float32, computed in float32 as model code does."""
    exponents = torch.arange(0, rope.lanes, 2, dtype=torch.float32) / rope.lanes
    plain = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return plain
        case Linear(factor):
            return plain / factor
        case Divisors(values):
            return plain / torch.tensor(values, dtype=torch.float32)
        case Llama3():
            return _llama3(plain, rope.scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3) -> torch.Tensor:
    turns = scaling.original_context * plain / (2 * math.pi)  # how often a lane pair turns within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


class RopeTable:
    """cos and sin of every position so far asked for. It grows by doubling, so that a short run of a long-context model stays small."""

    def __init__(self, rope: Rope, context: int, device: str) -> None:
        self._context = context
        self._inverse = inverse_frequencies(rope).to(device)  # [R]
        self._build(min(context, FIRST_ROWS))

    def rows(self, positions: torch.Tensor, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, R] float32 of positions [T] int64, all below `stop`."""
        if stop > self._cos.shape[0]:
            self._build(min(self._context, 1 << (stop - 1).bit_length()))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _build(self, count: int) -> None:
        angles = torch.arange(count, dtype=torch.float32, device=self._inverse.device)[:, None] * self._inverse
        self._cos, self._sin = angles.cos(), angles.sin()  # [count, R] each
