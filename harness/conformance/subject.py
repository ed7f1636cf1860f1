"""The strategy under test, as the kit sees it: a way to make one from (geometry, budget, ops), and facts read off the contract.

It does not know where the strategy came from; `doors.py` turns a YAML name or a `module:Class` into a subject.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from harness.conformance import toy
from harness.conformance.promise import NotApplicable
from kernels.api import Ops
from kernels.backend import resolve
from strategies.base import KVCache
from strategies.geometry import Geometry, Refused

Factory = Callable[[Geometry, int | None, Ops], KVCache]


@dataclass(frozen=True)
class Subject:
    """`make` is the door; `vary` makes the same strategy with other parameters, where it takes any."""

    name: str
    make: Factory
    backend: str = "auto"
    seed: int = 0
    examples: int = 30
    parameters: Mapping[str, Any] = field(default_factory=dict)
    vary: Callable[[Mapping[str, Any]], Factory] | None = None
    configured: Factory | None = None  # the strategy with its own numbers, where `make` has smaller ones

    @cached_property
    def ops(self) -> Ops:
        """The backend, resolved once."""
        return resolve(self.backend, "cpu")

    def varied(self, changes: Mapping[str, Any]) -> Subject:
        """The same strategy with some parameters changed; NotApplicable when it does not take them."""
        unknown = [name for name in changes if name not in self.parameters]
        if self.vary is None or unknown:
            raise NotApplicable(f"takes no {', '.join(unknown) or 'parameters'}")
        parameters = {**self.parameters, **changes}
        return replace(self, make=self.vary(parameters), parameters=parameters)

    def accepted(self, geometry: Geometry) -> Geometry:
        """`geometry`, or the nearest one that this strategy takes: with its own KV heads, without windows of the model's own."""
        cache, refusal = self._try(geometry)
        if cache is None:
            layers = tuple(replace(layer, window=None) for layer in geometry.layers)
            geometry = replace(geometry, layers=layers)
            cache, _ = self._try(geometry)
        if cache is None:
            raise NotApplicable(f"refused: {refusal}")
        if cache.heads is None or cache.heads.kv_heads == geometry.layers[0].kv_heads:
            return geometry
        kv_heads = geometry.query_heads if cache.heads.kv_heads is None else cache.heads.kv_heads
        layers = tuple(replace(layer, kv_heads=kv_heads) for layer in geometry.layers)
        queries = geometry.query_heads if geometry.query_heads % kv_heads == 0 else kv_heads * 2
        return replace(geometry, layers=layers, query_heads=queries)

    def geometry(
        self,
        heads: tuple[int, int] = (6, 3),
        head_dim: int = 16,
        windows: tuple[int | None, ...] = (None, 5),
        dtype: str = "float64",
        context: int = 256,
        softcap: float | None = None,
    ) -> Geometry:
        """A toy geometry that this strategy takes."""
        return self.accepted(toy.geometry(heads, head_dim, windows, dtype, context, softcap))

    def rewindable(
        self, tokens: int, heads: tuple[int, int] = (6, 3), head_dim: int = 16, windows: tuple[int | None, ...] = (None, 5)
    ) -> Geometry:
        """A toy geometry on which `truncate` takes back at least `tokens`; without the model's windows where those forbid it."""
        for choice in (windows, (None,) * len(windows)):
            geometry = self.geometry(heads, head_dim, choice)
            rewind = self.make(geometry, None, self.ops).rewind
            if rewind >= tokens:
                return geometry
        raise NotApplicable(f"declares a rewind of {rewind:g}, shorter than {tokens}")

    def facts(self, geometry: Geometry) -> Facts:
        """What the contract says about this strategy on `geometry`."""
        cache = self.make(geometry, None, self.ops)
        masks = [cache.mask(layer) for layer in range(len(geometry.layers))]
        aged = next((length for length in range(1, geometry.context + 1) if cache.aged(length - 1) > 0), None)
        return Facts(
            window=max((mask.window for mask in masks if mask.window is not None), default=None),
            sinks=max(mask.sinks for mask in masks),
            page_size=getattr(cache, "page_size", None),
            first_aged=aged,
            rewind=cache.rewind,
            stores=cache.bytes_for([8]) > 0,
            lossless=cache.codec_k.name == "raw" and cache.codec_v.name == "raw",
        )

    def _try(self, geometry: Geometry) -> tuple[KVCache | None, str]:
        try:
            return self.make(geometry, None, self.ops), ""
        except Refused as refusal:
            return None, str(refusal)


@dataclass(frozen=True)
class Facts:
    """Read off the public contract, except `page_size`, which a paged cache may show as an attribute."""

    window: int | None  # the widest finite one of any layer
    sinks: int
    page_size: int | None
    first_aged: int | None  # shortest length at which some token is read through the codec
    rewind: float
    stores: bool
    lossless: bool

    @property
    def reach(self) -> int:
        """Tokens after which pages, window, residual and rewind have all come into play."""
        page = 4 if self.page_size is None else self.page_size
        slack = 0 if self.rewind == float("inf") else int(self.rewind)
        window = 0 if self.window is None else self.window + self.sinks + slack
        return max(2 * page + 1, window + page + 1, (self.first_aged or 0) + page)

    def edges(self) -> list[int]:
        """Lengths one short of, at, and one past whatever may be off by one."""
        page = 4 if self.page_size is None else self.page_size
        marks = {page, 2 * page} | ({self.window, self.window + self.sinks} if self.window is not None else set())
        marks |= set() if self.first_aged is None else {self.first_aged}
        return sorted({length + off for length in marks for off in (-1, 0, 1)} & set(range(1, 10**6)))


def stored(subject: Subject, geometry: Geometry) -> Facts:
    """The facts, or NotApplicable for a strategy that stores nothing."""
    facts = subject.facts(geometry)
    if not facts.stores:
        raise NotApplicable("stores nothing")
    return facts
