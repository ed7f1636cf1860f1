"""A paged cache with a planted fault, for tests that need a run to go wrong. It knows nothing of the tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from strategies.base import Plan
from strategies.geometry import Stats
from strategies.paged import Paged


class ForgetsValues(Paged):
    """Stores zeros where values belong."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        return super().attend(layer, q, k, torch.zeros_like(v), plan)


class Underbills(Paged):
    """Bills a byte less than it holds."""

    def bytes_for(self, lengths: list[int], chunk: int = 1) -> int:
        return super().bytes_for(lengths, chunk) - 1


class Overstates(Paged):
    """Reserves a byte less than it says."""

    def stats(self) -> Stats:
        said = super().stats()
        return replace(said, reserved_bytes=said.reserved_bytes + 1)


class LivesBeyondItsMeans(Paged):
    """Says that more is live than is in use."""

    def stats(self) -> Stats:
        said = super().stats()
        return replace(said, live_bytes=said.in_use_bytes + 1 if said.in_use_bytes else 0)


class AnswersItself(Paged):
    """Attends with kernels that nobody counts."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        before = Counter(self.ops.calls)
        out = super().attend(layer, q, k, v, plan)
        self.ops.calls.clear()
        self.ops.calls.update(before)
        return out


class StoresWide(Paged):
    """Holds its codes and, beside them, the same memory four times as wide; it bills and reports both."""

    def tensors(self) -> list[torch.Tensor]:
        held = super().tensors()
        return held + [torch.empty_like(tensor, dtype=torch.float32) for tensor in held if tensor.element_size() == 1]

    def stats(self) -> Stats:
        said = super().stats()
        return replace(said, reserved_bytes=said.reserved_bytes + self._extra())

    def bytes_for(self, lengths: list[int], chunk: int = 1) -> int:
        honest = super().bytes_for(lengths, chunk)
        held = sum(tensor.nbytes for tensor in super().tensors())
        return honest + (self._extra() * honest // held if held else self._predicted(honest))

    def _extra(self) -> int:
        return 4 * sum(tensor.nbytes for tensor in super().tensors() if tensor.element_size() == 1)

    def _predicted(self, honest: int) -> int:
        """The codes' share of a row, four times over: `head_dim` bytes of `head_dim` and a scale."""
        head_dim = self.geometry.layers[0].head_dim
        return 4 * honest * head_dim // (head_dim + 4)
