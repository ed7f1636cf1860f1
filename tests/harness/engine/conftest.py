"""A toy decoder that sees its past only through `cache.attend`, and engines around it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.engine.engine import Engine
from harness.engine.request import Request
from harness.engine.sampler import Sampler
from harness.engine.scheduler import scheduler_for
from harness.measure.clock import ManualClock
from kernels.backend import resolve
from strategies.base import KVCache, Plan
from strategies.contiguous import Contiguous
from strategies.geometry import Geometry, LayerShape
from strategies.none import NoCache
from strategies.paged import Paged

VOCAB, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 61, 2, 6, 3, 8, 128
STORAGES = {"none": NoCache, "contiguous": Contiguous, "paged": Paged}


class ToyDecoder:
    """Two attention layers with seeded float64 weights. `before_layer` runs before each layer; `seconds` pass per step."""

    def __init__(self) -> None:
        torch_rng = torch.Generator().manual_seed(7)
        hidden = QUERY_HEADS * HEAD_DIM

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=torch_rng, dtype=torch.float64) / shape[0] ** 0.5

        self.embedding = weights(VOCAB, hidden) * VOCAB**0.5
        self.position = weights(CONTEXT, hidden) * CONTEXT**0.5
        self.q = [weights(hidden, QUERY_HEADS * HEAD_DIM) for _ in range(LAYERS)]
        self.k = [weights(hidden, KV_HEADS * HEAD_DIM) for _ in range(LAYERS)]
        self.v = [weights(hidden, KV_HEADS * HEAD_DIM) for _ in range(LAYERS)]
        self.head = weights(hidden, VOCAB) * 3
        self.before_layer: Callable[[int], None] = lambda layer: None
        self.calls = 0

    def __call__(self, ids: torch.Tensor, plan: Plan, cache: KVCache, rows: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        x = self.embedding[ids] + self.position[plan.positions]  # [T, E]
        for layer in range(LAYERS):
            self.before_layer(layer)
            q = (x @ self.q[layer]).view(-1, QUERY_HEADS, HEAD_DIM)
            k = (x @ self.k[layer]).view(-1, KV_HEADS, HEAD_DIM)
            v = (x @ self.v[layer]).view(-1, KV_HEADS, HEAD_DIM)
            x = torch.tanh(x + 2 * cache.attend(layer, q, k, v, plan).flatten(1))
        return x[plan.logit_rows if rows is None else rows] @ self.head


class Toy:
    """The pieces of a test engine; everything is made afresh by each call."""

    def __init__(self) -> None:
        self.geometry = Geometry((LayerShape(KV_HEADS, HEAD_DIM),) * LAYERS, QUERY_HEADS, HEAD_DIM**-0.5, None, "float64", "cpu", CONTEXT)
        self.row_bytes = LAYERS * 2 * KV_HEADS * HEAD_DIM * 8
        self.decoder = ToyDecoder()
        self.clock = ManualClock()

    def cache(self, storage: str, budget_bytes: int | None = None, **params: object) -> KVCache:
        return STORAGES[storage](self.geometry, budget_bytes, resolve("reference"), **params)

    def engine(self, cache: KVCache, step_tokens: int = 2048, max_sequences: int | None = None, eos_ids: tuple[int, ...] = ()) -> Engine:
        return Engine(self.decoder, cache, scheduler_for(cache, step_tokens, max_sequences), Sampler(), self.clock, eos_ids)

    def answers(self, cache: KVCache, requests: list[Request], step_tokens: int = 2048) -> dict[int, tuple[int, ...]]:
        """The tokens that each request produces."""
        engine = self.engine(cache, step_tokens)
        engine.run(requests)
        return {id_: completion.tokens for id_, completion in engine.completions.items()}


def prompt(row: int, length: int) -> tuple[int, ...]:
    """A prompt that no other row has."""
    return tuple((17 * row + 7 * i * i + 3 * i + 1) % VOCAB for i in range(length))


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def make_prompt() -> Callable[[int, int], tuple[int, ...]]:
    return prompt
