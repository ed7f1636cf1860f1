"""No cache: every step feeds each sequence from its first token again.

The baseline that shows what a cache saves. It stores nothing, so every other strategy's answer must equal its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.api import Ops
from strategies.base import History, KVCache, Packed, Plan
from strategies.geometry import Geometry, HeadSharing, Stats


class NoCache(KVCache):
    """Holds lengths, no rows: `held` is always 0, so every span starts at 0."""

    def __init__(self, geometry: Geometry, budget_bytes: int | None, backend: Ops, *, heads: HeadSharing | None = None) -> None:
        super().__init__(geometry, budget_bytes, backend)
        self.heads = heads

    def held(self, sid: int) -> int:
        self._history(sid)
        return 0

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        return self.ops.attend_packed(q, k, v, plan.batch, self.mask(layer), self.geometry.scale, self.geometry.softcap)

    def stats(self) -> Stats:
        return Stats(0, 0, 0, 0)

    def bytes_for(self, lengths: Sequence[int], chunk: int = 1) -> int:
        return 0

    def bytes_per_token(self) -> float:
        return 0

    def tensors(self) -> list[torch.Tensor]:
        return []

    def _opened(self, sid: int, history: History, prompt: Sequence[int], expect: int | None) -> None:
        self._histories[sid] = history

    def _forked(self, sid: int, child: int) -> None:
        pass

    def _truncated(self, sid: int, length: int) -> None:
        pass

    def _closed(self, sid: int) -> None:
        pass

    def _planned(self, spans: tuple[tuple[int, int, int], ...]) -> Plan:
        return self._new_plan(Packed(spans), None)

    def _aborted(self, plan: Plan) -> None:
        pass
