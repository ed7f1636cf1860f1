"""A cache driven by hand: keys are zero, so an answer is the mean of the values a query may see, and values name token and position.

Every answer is compared with that mean over the history kept here, in plain Python; unwritten and foreign memory is poisoned.
It does not know how a cache stores rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from harness.conformance.poison import PoisonOps
from kernels.backend import resolve
from strategies.base import KVCache, Plan
from strategies.geometry import CacheFull, Geometry, LayerShape
from strategies.paged import Paged

HEAD_DIM = 4


def shape(windows: tuple[int | None, ...] = (None,), dtype: str = "float64", context: int = 64, kv_heads: int = 1) -> Geometry:
    """A model of one layer for each window, three query heads for each KV head."""
    layers = tuple(LayerShape(kv_heads, HEAD_DIM, window) for window in windows)
    return Geometry(layers, 3 * kv_heads, 0.5, None, dtype, "cpu", context)


def ops() -> PoisonOps:
    return PoisonOps(resolve("reference", "cpu"))


def paged(windows: tuple[int | None, ...] = (None,), budget: int | None = None, context: int = 64, **parameters: object) -> Paged:
    """A paged cache of `shape(windows)`."""
    return Paged(shape(windows, context=context), budget, ops(), **parameters)


def nbytes(cache: KVCache) -> int:
    """Bytes of the tensors that the cache really holds."""
    return sum(tensor.numel() * tensor.element_size() for tensor in cache.tensors())


def value(token: int, position: int) -> list[float]:
    """The V row of one token: no two (token, position) share it."""
    return [float(token), float(position), float(token * position), 1.0]


def coarse_value(token: int, position: int) -> list[float]:
    """A V row of whole numbers from 0 to 15, both ends included: 4-bit groups hold it exactly."""
    return [0.0, 15.0, float(token % 16), float((7 * position + position // 16) % 16)]


class Driver:
    """One cache and the history that each of its sequences must have."""

    def __init__(self, cache: KVCache, value: Callable[[int, int], list[float]] = value) -> None:
        self.cache = cache
        self.value = value
        self.logs: dict[int, list[int]] = {}

    def open(self, prompt: Sequence[int] = (), expect: int | None = None) -> int:
        sid = self.cache.open(prompt, expect)
        self.logs[sid] = list(prompt[: self.cache.held(sid)])
        return sid

    def start(self, tokens: Sequence[int], chunk: int | None = None, expect: int | None = None) -> int:
        """Open a sequence and feed it `tokens`, `chunk` at a time."""
        sid = self.open(tokens, expect)
        self.feed(sid, tokens[len(self.logs[sid]) :], chunk)
        return sid

    def feed(self, sid: int, tokens: Sequence[int], chunk: int | None = None) -> None:
        size = len(tokens) if chunk is None else chunk
        for at in range(0, len(tokens), max(size, 1)):
            self.step({sid: tokens[at : at + size]})

    def step(self, news: Mapping[int, Sequence[int]]) -> None:
        plan = self.plan(news)
        self.run(plan, news)
        self.commit(plan, news)

    def plan(self, news: Mapping[int, Sequence[int]]) -> Plan:
        return self.cache.plan({sid: len(self.logs[sid]) + len(new) for sid, new in news.items()})

    def run(self, plan: Plan, news: Mapping[int, Sequence[int]], layers: int | None = None) -> None:
        """Attend through the first `layers` layers (all when None) and compare with the mean of what each query may see."""
        values = {
            sid: np.array([self.value(token, at) for at, token in enumerate([*self.logs[sid], *news[sid]])]) for sid in news
        }  # [n, D]
        rows = torch.from_numpy(np.concatenate([values[sid][start:stop] for sid, start, stop in plan.spans]))  # [T, D]
        geometry = self.cache.geometry
        for layer in range(len(geometry.layers) if layers is None else layers):
            heads = geometry.layers[layer].kv_heads
            v = rows[:, None, :].repeat(1, heads, 1).to(self.cache.dtype)
            q = torch.ones(len(rows), geometry.query_heads, HEAD_DIM, dtype=self.cache.dtype)
            out = self.cache.attend(layer, q, torch.zeros_like(v), v, plan).numpy()
            mask, at = self.cache.mask(layer), 0
            for sid, start, stop in plan.spans:
                i, j = np.arange(start, stop)[:, None], np.arange(stop)[None, :]
                seen = (j <= i) & ((i - j < mask.window) | (j < mask.sinks) if mask.window is not None else True)  # [t, n]
                want = seen @ values[sid] / seen.sum(1, keepdims=True)
                got = out[at : at + stop - start]  # [t, Hq, D]
                assert np.abs(got - want[:, None]).max() < 1e-9, f"layer {layer}, sequence {sid}, queries {start} to {stop - 1}"
                at += stop - start

    def commit(self, plan: Plan, news: Mapping[int, Sequence[int]]) -> None:
        logs = {sid: [*self.logs[sid], *new] for sid, new in news.items()}
        self.cache.commit(plan, [token for sid, start, stop in plan.spans for token in logs[sid][start:stop]])
        self.logs |= logs

    def abort_after(self, news: Mapping[int, Sequence[int]], layers: int | None = None) -> None:
        """Plan, attend through some layers, and think better of it."""
        plan = self.plan(news)
        self.run(plan, news, layers)
        self.cache.abort(plan)

    def fork(self, sid: int) -> int:
        child = self.cache.fork(sid)
        self.logs[child] = list(self.logs[sid])
        return child

    def truncate(self, sid: int, length: int) -> None:
        self.cache.truncate(sid, length)
        del self.logs[sid][length:]

    def close(self, *sids: int) -> None:
        for sid in sids or tuple(self.logs):
            self.cache.close(sid)
            del self.logs[sid]

    def look(self) -> None:
        """Read every sequence back: plan one token each, compare the answers, take the plan back."""
        for sid in self.logs:
            self.look_at(sid)

    def look_at(self, sid: int) -> None:
        if len(self.logs[sid]) < self.cache.geometry.context:
            self.abort_after({sid: [7]})

    def fits(self, length: int, most: int = 60) -> int:
        """How many new sequences of `length` tokens fit beside the living ones, found by filling; they are closed again."""
        opened = []
        try:
            while len(opened) < most:
                opened.append(self.open(expect=length))
                news = {opened[-1]: [len(opened)] * length}
                self.commit(self.plan(news), news)
        except CacheFull:
            opened_whole = len(opened) - 1
        else:
            raise AssertionError(f"{most} sequences of {length} tokens fit: the budget limits nothing")
        finally:
            self.close(*opened)
        return opened_whole


def fresh_fits(make: Callable[[], KVCache], length: int) -> int:
    """What `fits` says of a cache that has done nothing yet."""
    return Driver(make()).fits(length)
