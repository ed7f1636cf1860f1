"""A stand-in for a device's graphs: it calls again what was called, with the very objects of then.

The numbers on the host are those of the recorded step, so what reads them answers wrongly, as it would in a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.api import Ops


class Repeats:
    """Records a call by keeping it. `ops` count nothing while it is replayed: what a graph launches, nobody calls."""

    def __init__(self, ops: Ops) -> None:
        self.recorded = 0
        self._ops = ops

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.recorded += 1
        out = call().clone()

        @torch.inference_mode()
        def replay() -> None:
            counted = self._ops.calls.copy()
            out.copy_(call())
            self._ops.calls = counted

        return replay, out
