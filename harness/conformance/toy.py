"""Small geometries, and rows of Q, K and V that depend on nothing but tokens and positions: a model without a model.

It does not know how a cache stores rows. Shapes are chosen so that wrong head mappings, strides and tails show: head groups
that differ from the number of KV heads, head_dims off the powers of two, K unlike V, every layer its own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from strategies.base import KVCache, Plan
from strategies.geometry import Geometry, LayerShape

HEADS = ((6, 3), (8, 2), (4, 4), (4, 1))  # (query, KV); 4/2 and 9/3 would hide head // Hkv
HEAD_DIMS = (8, 16, 24, 80, 128)
VOCABULARY = 97
PREFIXES = 61  # rows also depend on a hash of all earlier tokens, so that equal tokens after another prefix differ

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # q [t, Hq, D], k [t, Hkv, D], v [t, Hkv, D]


def geometry(
    heads: tuple[int, int] = (6, 3),
    head_dim: int = 16,
    windows: tuple[int | None, ...] = (None, 5),
    dtype: str = "float64",
    context: int = 256,
    softcap: float | None = None,
) -> Geometry:
    """A toy model: one layer for each entry of `windows`."""
    layers = tuple(LayerShape(heads[1], head_dim, window) for window in windows)
    return Geometry(layers, heads[0], head_dim**-0.5, softcap, dtype, "cpu", context)


@dataclass(frozen=True)
class RandomFeed:
    """Rows drawn once for each token, position and prefix of each layer. Keys are scaled so that softmax is not flat."""

    geometry: Geometry
    seed: int = 0
    spread: float = 1.5
    offset: float = 0.0  # added to every K and V

    def rows(self, layer: int, tokens: Sequence[int], start: int, stop: int) -> Rows:
        shape = self.geometry.layers[layer]
        ids, hashes = np.array(tokens[:stop]), _prefix_hashes(tokens[:stop])
        parts = []
        for role, heads in enumerate((self.geometry.query_heads, shape.kv_heads, shape.kv_heads)):
            width = (heads, shape.head_dim)
            by_token, by_prefix, by_position = (
                self._table(layer, role, kind, count, width) for kind, count in enumerate((VOCABULARY, PREFIXES, 64))
            )
            rows = by_token[ids[start:]] + by_prefix[hashes[start:]] + by_position[np.arange(start, stop) % 64]
            parts.append(rows * (self.spread / 3**0.5) + (self.offset if role else 0.0))
        return parts[0], parts[1], parts[2]

    def _table(self, layer: int, role: int, kind: int, count: int, width: tuple[int, int]) -> np.ndarray:
        key = (self.seed, layer, role, kind, *width)
        if key not in _TABLES:
            _TABLES[key] = np.random.default_rng(key).normal(size=(count, *width))
        return _TABLES[key]


_TABLES: dict[tuple[int, ...], np.ndarray] = {}


@dataclass(frozen=True)
class ProbeFeed:
    """The attended-set probe: K = 0 gives uniform weights, V = identity rows, so an output row lists what was attended.

    Lanes stand for positions first..first+D-1; other positions have V = 0.
    """

    geometry: Geometry
    first: int = 0

    def rows(self, layer: int, tokens: Sequence[int], start: int, stop: int) -> Rows:
        shape, count = self.geometry.layers[layer], stop - start
        k = np.zeros((count, shape.kv_heads, shape.head_dim))
        lanes = np.arange(start, stop)[:, None] - self.first == np.arange(shape.head_dim)[None, :]
        v = np.repeat(lanes[:, None, :].astype(float), shape.kv_heads, axis=1)
        return np.ones((count, self.geometry.query_heads, shape.head_dim)), k, v


class ToyDecoder:
    """A decoder with random weights in which every layer's rows depend on the layers below: for greedy runs."""

    def __init__(self, geometry: Geometry, seed: int = 0, hidden: int = 48) -> None:
        rng = np.random.default_rng(seed)
        self.geometry = geometry
        self._dtype = getattr(torch, geometry.dtype)
        self._embed = self._weights(rng, VOCABULARY, hidden) * hidden**0.5
        self._places = self._weights(rng, geometry.context, hidden) * hidden**0.5
        self._layers = []
        for shape in geometry.layers:
            sizes = [heads * shape.head_dim for heads in (geometry.query_heads, shape.kv_heads, shape.kv_heads)]
            projections = [self._weights(rng, hidden, size) * 1.5 for size in sizes]
            self._layers.append((shape, projections, self._weights(rng, sizes[0], hidden) * 1.5))

    def __call__(self, ids: torch.Tensor, plan: Plan, cache: KVCache) -> torch.Tensor:
        """Logits [B, V] of the last token of each span."""
        x = self._embed[ids] + self._places[plan.positions]  # [T, hidden]
        for layer, (shape, projections, back) in enumerate(self._layers):
            normed = x / x.pow(2).mean(-1, keepdim=True).sqrt()
            q, k, v = ((normed @ w).unflatten(-1, (-1, shape.head_dim)) for w in projections)
            x = x + cache.attend(layer, q, k, v, plan).flatten(1) @ back
        return x[plan.logit_rows] @ self._embed.T

    def _weights(self, rng: np.random.Generator, rows: int, columns: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=(rows, columns)) * rows**-0.5).to(self._dtype)


def greedy(decoder: ToyDecoder, cache: KVCache, prompt: Sequence[int], count: int) -> list[int]:
    """One sequence: the prompt in one step, then `count` tokens, always the likeliest."""
    sid, tokens = cache.open(expect=len(prompt) + count), list(prompt)
    for _ in range(count):
        plan = cache.plan({sid: len(tokens)})
        ids = [token for _, start, stop in plan.spans for token in tokens[start:stop]]
        logits = decoder(torch.tensor(ids), plan, cache)
        cache.commit(plan, ids)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


def _prefix_hashes(tokens: Sequence[int]) -> np.ndarray:
    """[n] a number below PREFIXES for each position, from the tokens before it."""
    hashes, value = [], 0
    for token in tokens:
        hashes.append(value)
        value = (value * 31 + token + 1) % PREFIXES
    return np.array(hashes, dtype=int)
