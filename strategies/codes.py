"""Pages of coded groups for KIVI: one page is `group` tokens of every layer, immutable once written.

It does not know which tokens are old enough to be coded; `kivi.py` says how many groups a sequence has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from strategies.geometry import Geometry
from strategies.kivi_codec import decode_keys, decode_values, encode_keys, encode_values, packed_bytes
from strategies.pages import PagePool
from strategies.stores import copy_moved
from strategies.tables import PageTables


class CodePages:
    """One pool and one set of tables for all layers. Page 0 is never handed out."""

    def __init__(self, geometry: Geometry, bits: int, group: int, value_group: int) -> None:
        self._geometry, self._bits, self._group, self._value_group = geometry, bits, group, value_group
        self.pool = PagePool(0)
        self._tables = PageTables()
        self._expect: dict[int, int] = {}
        self._layers: list[dict[str, torch.Tensor]] = []
        self.page_bytes = sum(part.numel() * part.element_size() for layer in self._new(1) for part in layer.values())

    def allocate(self, pages: int) -> None:
        """Own `pages` usable pages; those already held keep their ids and bytes."""
        old, self._layers = self._layers, self._new(pages + 1)
        self.pool.grow(pages - self.pool.capacity)
        for before, after in zip(old, self._layers, strict=False):
            for name, part in before.items():
                after[name][: len(part)] = part

    def resize(self, pages: int) -> None:
        """Own exactly `pages` usable pages, fewer than before: those in use are moved together."""
        old, self._layers = self._layers, self._new(pages + 1)
        moved = self.pool.compact(pages)
        self._tables.renumber(moved)
        for before, after in zip(old, self._layers, strict=True):
            for name, part in before.items():
                copy_moved(part, after[name], moved, 1)

    def open(self, sid: int, expect: int) -> None:
        """`expect`: groups it may come to hold."""
        self._tables.open(sid)
        self._expect[sid] = expect

    def fork(self, sid: int, child: int) -> None:
        pages = self._tables.mapped(sid)
        self._tables.open(child)
        self._expect[child] = self._expect[sid]
        self.pool.share(pages)
        self._tables.append(child, pages)

    def cut(self, sid: int, groups: int) -> None:
        """Forget the groups from `groups` on."""
        self.pool.release(reversed(self._tables.cut(sid, groups)))

    def close(self, sid: int) -> None:
        self.cut(sid, 0)
        self._tables.close(sid)
        del self._expect[sid]

    def reserve(self, groups: Mapping[int, int]) -> None:
        """Without a budget: own what is mapped, what these sequences need and what every open one expects to hold beyond that."""
        more = (max(expect, groups.get(sid, 0)) - self._tables.count(sid) for sid, expect in self._expect.items())
        wanted = self.pool.owned + sum(max(0, pages) for pages in more)
        if wanted > self.pool.capacity:
            self.allocate(wanted)

    def short_pages(self, groups: Mapping[int, int]) -> int:
        """Pages missing for these sequences to hold this many groups each. Changes nothing."""
        return max(0, self.wanted_pages(groups) - self.pool.available)

    def wanted_pages(self, groups: Mapping[int, int]) -> int:
        """Pages that these sequences have to take to hold this many groups each. Changes nothing."""
        return sum(max(0, count - self._tables.count(sid)) for sid, count in groups.items())

    def take(self, sid: int, groups: int) -> tuple[int, int]:
        """Map pages up to `groups` groups -> how many there were and are."""
        before = self._tables.count(sid)
        self._tables.append(sid, self.pool.take(max(0, groups - before)))
        return before, max(before, groups)

    def write(self, layer: int, sid: int, logical: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Encode one group of rows [G, Hkv, D] into the sequence's page `logical`."""
        page, parts = self._tables.page(sid, logical), self._layers[layer]
        parts["k_codes"][page], parts["k_scale"][page], parts["k_zero"][page] = encode_keys(keys, self._bits)
        parts["v_codes"][page], parts["v_scale"][page], parts["v_zero"][page] = encode_values(values, self._bits, self._value_group)

    def read(self, layer: int, sid: int, groups: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `groups` groups, decoded: [groups * G, Hkv, D] each."""
        parts = self._layers[layer]
        pages = torch.tensor(self._tables.mapped(sid)[:groups], dtype=torch.int64, device=self._geometry.device)
        k = decode_keys(*(parts[name][pages] for name in ("k_codes", "k_scale", "k_zero")), self._bits, dtype)
        head_dim = self._geometry.layers[layer].head_dim
        v = [parts[name][pages] for name in ("v_codes", "v_scale", "v_zero")]
        return k.flatten(0, 1), decode_values(*v, self._bits, self._value_group, head_dim, dtype).flatten(0, 1)

    def stats(self, groups: Mapping[int, int]) -> tuple[int, int, int]:
        """Bytes reserved, in use, and live when a future query reads the first `groups[sid]` groups."""
        live = {page for sid, count in groups.items() for page in self._tables.mapped(sid)[:count]}
        reserved = sum(part.numel() * part.element_size() for part in self.tensors())
        return reserved, self.pool.owned * self.page_bytes, len(live) * self.page_bytes

    def tensors(self) -> list[torch.Tensor]:
        return [part for layer in self._layers for part in layer.values()]

    def _new(self, pages: int) -> list[dict[str, torch.Tensor]]:
        group, device = self._group, self._geometry.device
        layers = []
        for shape in self._geometry.layers:
            heads, dim = shape.kv_heads, shape.head_dim
            row = packed_bytes(dim, self._bits)
            parts = -(-dim // self._value_group)
            codes = [torch.empty(pages, group, heads, row, dtype=torch.uint8, device=device) for _ in "kv"]
            k_scale, k_zero = (torch.empty(pages, heads, dim, dtype=torch.float16, device=device) for _ in range(2))
            v_scale, v_zero = (torch.empty(pages, group, heads, parts, dtype=torch.float16, device=device) for _ in range(2))
            names = ("k_codes", "v_codes", "k_scale", "k_zero", "v_scale", "v_zero")
            layers.append(dict(zip(names, (*codes, k_scale, k_zero, v_scale, v_zero), strict=True)))
        return layers
