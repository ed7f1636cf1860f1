"""Known text fed through a cache, the logits it gives at the places asked for, and how much of the past came from the cache.

It does not know what the logits are for, nor which strategy holds the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from harness.engine.decoding import DecoderLike
from kernels.rows import Mask
from strategies.base import KVCache


@dataclass(frozen=True)
class Side:
    """A model and the cache that it runs through."""

    decoder: DecoderLike
    cache: KVCache


@dataclass
class Reads:
    """(query, key) pairs that scored queries attended, summed over layers, and those whose key was fed in an earlier step."""

    earlier: int = 0
    pairs: int = 0

    def add(self, masks: Counter[Mask], start: int, queries: range) -> None:
        """These queries ran in a step that fed its sequence from position `start` on. masks: how many layers have each."""
        for mask, layers in masks.items():
            for query in queries:
                self.earlier += layers * seen_below(mask, query, min(start, query + 1))
                self.pairs += layers * seen_below(mask, query, query + 1)

    @property
    def ratio(self) -> float:
        """Share of pairs read from the cache; 0 for a full forward, which proves nothing about a cache."""
        return self.earlier / self.pairs if self.pairs else 0.0


def seen_below(mask: Mask, query: int, limit: int) -> int:
    """How many keys at positions below `limit` (at most query + 1) the query may see."""
    first = mask.first_visible(query)
    return max(0, limit - first) + min(mask.sinks, first, limit)


@dataclass
class Reader:
    """One sequence of known tokens on one side. `parts` cuts every span into so many steps."""

    side: Side
    sid: int
    tokens: Sequence[int]
    parts: int = 1
    reads: Reads = field(default_factory=Reads)
    masks: Counter[Mask] = field(default_factory=Counter)

    def feed(self, first: int, stop: int) -> None:
        """Feed positions first..stop-1; nobody needs their logits."""
        for a, b in self._cuts(first, stop):
            self._step(a, b, range(0))

    def read(self, first: int, stop: int) -> torch.Tensor:
        """Feed positions first..stop-1 -> logits [stop - first, V], row i predicts the token after position first + i."""
        return torch.cat([self._step(a, b, range(a, b)) for a, b in self._cuts(first, stop)])

    def _cuts(self, first: int, stop: int) -> list[tuple[int, int]]:
        edges = [first + (stop - first) * part // self.parts for part in range(self.parts + 1)]
        return [(a, b) for a, b in pairwise(edges) if b > a]

    def _step(self, first: int, stop: int, wanted: range) -> torch.Tensor:
        """One step up to `stop`; the plan says where it really starts -> logits of the positions `wanted`."""
        cache = self.side.cache
        plan = cache.plan({self.sid: stop})
        try:
            ((_, start, _),) = plan.spans
            device = plan.positions.device
            fed = list(self.tokens[start:stop])
            rows = torch.arange(wanted.start - start, wanted.stop - start, device=device) if wanted else None  # [R] int64
            with torch.no_grad():
                logits = self.side.decoder(torch.tensor(fed, device=device), plan, cache, rows)
            cache.commit(plan, fed)
        except BaseException:
            cache.abort(plan)
            raise
        self.reads.add(self.masks, start, wanted)
        return logits


@contextmanager
def reading(side: Side, tokens: Sequence[int], parts: int = 1) -> Iterator[Reader]:
    """A reader of `tokens`, all but the last of which it may feed, on an empty sequence of `side`; given back at the end."""
    cache = side.cache
    masks = Counter(cache.mask(layer) for layer in range(len(cache.geometry.layers)))
    sid = cache.open(expect=len(tokens) - 1)
    try:
        yield Reader(side, sid, tokens, parts, masks=masks)
    finally:
        cache.close(sid)
