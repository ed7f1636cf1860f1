"""A paged cache with a planted fault, for tests that need a run to go wrong. It knows nothing of the tests."""

from __future__ import annotations

import torch

from strategies.base import Plan
from strategies.paged import Paged


class ForgetsValues(Paged):
    """Stores zeros where values belong."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        return super().attend(layer, q, k, torch.zeros_like(v), plan)


class Underbills(Paged):
    """Bills a byte less than it holds."""

    def bytes_for(self, lengths: list[int], chunk: int = 1) -> int:
        return super().bytes_for(lengths, chunk) - 1
