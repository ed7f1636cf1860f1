"""Planning one decode step of 32 sequences: the host's share of a step, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from harness.build import make_cache
from strategies.base import KVCache
from strategies.geometry import Geometry, LayerShape
from tests.benchmarks import toy
from tests.benchmarks.pairs import group, paired

GEOMETRY = Geometry((LayerShape(1, 32),), 1, 32**-0.5, None, "float32", "cpu", 512)
STRATEGIES = ("none", "contiguous", "contiguous_growth", "paged", "paged_prefix", "window", "kivi4")


@dataclass(frozen=True)
class Waiting:
    """A cache whose sequences each want one more token."""

    cache: KVCache
    stops: dict[int, int]


def waiting(name: str) -> Waiting:
    """A new cache that has been fed toy.PLANNED tokens, all the same."""
    cache = make_cache(toy.settings(name), GEOMETRY, None, toy.ops())
    stops = {cache.open(expect=length + 1): length for length in toy.PLANNED}
    plan = cache.plan(stops)
    rows = torch.ones(plan.batch.tokens, 1, 32)
    cache.attend(0, rows, rows, rows, plan)
    cache.commit(plan, [1] * plan.batch.tokens)
    return Waiting(cache, {sid: length + 1 for sid, length in stops.items()})


@group("planning on the host")
@pytest.mark.parametrize("name", STRATEGIES)
def test_planning(benchmark, name):
    results = paired(benchmark, lambda: waiting(name), lambda state: state.cache.plan(state.stops), lambda state: toy.held(state.cache))
    starts = [0] * len(toy.PLANNED) if name == "none" else toy.PLANNED
    for plan in results:
        assert [(start, stop) for _, start, stop in plan.spans] == [
            (start, length + 1) for start, length in zip(starts, toy.PLANNED, strict=True)
        ]
