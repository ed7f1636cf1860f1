"""What the engine needs of a decoder. It does not know which model that is."""

from __future__ import annotations

from typing import Protocol

import torch

from strategies.base import KVCache, Plan


class DecoderLike(Protocol):
    """Packed ids [T] int64 + plan + cache -> logits [R, V] of the packed rows `rows` [R] int64 (None: the last row of each span)."""

    def __call__(self, ids: torch.Tensor, plan: Plan, cache: KVCache, rows: torch.Tensor | None = None) -> torch.Tensor: ...
