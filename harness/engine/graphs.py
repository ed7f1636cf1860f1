"""Decode steps replayed from captured graphs: what was launched once for a plan's key is launched again without the host's work.

It does not know which strategy holds the rows: a plan's `key` says what may be replayed, and the plan's tensors stay where
they are. A graph reads one cache's memory, so it lives no longer than that cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from harness.engine.decoding import DecoderLike
from harness.measure.clock import Clock
from kernels.api import Ops
from strategies.base import KVCache, Plan

FINE_SIZES = (1, 2, 4)  # spans of a graph; above them, whole eights
COARSE = 8
LAUNCHED, RECORDED, REPLAYED = "launched", "recorded", "replayed"


class Recorder(Protocol):
    """How launches are recorded."""

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """(replay, out): `replay` launches again all that `call` launched, with the same tensors; its answer is then in `out`."""


class CudaGraphs:
    """torch's CUDA graphs, all in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Launches `call` once on a side stream before it is captured: compiling and allocating cannot be captured."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = call()
        return graph.replay, out


@dataclass(frozen=True)
class _Step:
    replay: Callable[[], None]
    ids: torch.Tensor  # [T] int64
    out: torch.Tensor  # [B, V]
    calls: Counter[str]  # kernel calls of one replay


class GraphedDecoder:
    """`decoder` on one cache. Steps whose plan has a key are recorded the first time and replayed from then on, the others launched.

    `steps` counts them by how they ran. Recording takes time that no later step takes: `recording_s` says how much so far.
    The kernel calls of a replay are counted in `ops.calls` like those of a launch.
    """

    def __init__(self, decoder: DecoderLike, ops: Ops, recorder: Recorder, clock: Clock, steps: Counter[str]) -> None:
        self.recording_s = 0.0
        self.steps = steps
        self._decoder, self._ops, self._recorder, self._clock = decoder, ops, recorder, clock
        self._recorded: dict[tuple[int, ...], _Step] = {}

    @staticmethod
    def pad_to(spans: int) -> int:
        """The spans of the graph that serves a decode step of `spans` sequences."""
        return next((size for size in FINE_SIZES if size >= spans), -(-spans // COARSE) * COARSE)

    def __call__(self, ids: torch.Tensor, plan: Plan, cache: KVCache, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits as the decoder's own, without those of pads. `ids` has none of theirs."""
        if plan.key is None:
            self.steps[LAUNCHED] += 1
            return self._decoder(ids, plan, cache, rows)
        step = self._recorded.get(plan.key)
        if step is None:
            self.steps[RECORDED] += 1
            step = self._recorded[plan.key] = self._record(ids, plan, cache)
        else:
            self.steps[REPLAYED] += 1
        step.ids[: len(ids)] = ids
        step.replay()
        self._ops.calls.update(step.calls)
        out = step.out[: len(plan.spans)]
        return out if rows is None else out[rows]

    def _record(self, ids: torch.Tensor, plan: Plan, cache: KVCache) -> _Step:
        """The rows that the step stores are stored again by its replay: nothing that it reads is changed by having run before."""
        self._clock.synchronise()
        start_s, counted = self._clock.now(), Counter(self._ops.calls)
        held = torch.zeros(plan.batch.tokens, dtype=ids.dtype, device=ids.device)
        held[: len(ids)] = ids
        calls: Counter[str] = Counter()

        def call() -> torch.Tensor:
            nonlocal calls
            before = Counter(self._ops.calls)
            out = self._decoder(held, plan, cache)
            calls = self._ops.calls - before
            return out

        replay, out = self._recorder.record(call)
        self._ops.calls = counted  # the first replay is the step; what ran to record it is not counted
        self._clock.synchronise()
        self.recording_s += self._clock.now() - start_s
        return _Step(replay, held, out, calls)
