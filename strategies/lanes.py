"""The layers of a paged cache that see the same keys: their page pool, page tables and row stores.

It does not know about steps or tokens; `paged.py` tells it which spans are coming and when they have happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from kernels.codec import Codec
from kernels.rows import RowStore
from strategies.base import KVCache, Packed, row_bytes
from strategies.geometry import Stats
from strategies.masks import live_union
from strategies.pages import SCRATCH, PagePool
from strategies.prefix import Node, PrefixIndex
from strategies.stores import copy_moved, copy_rows, flat, held_bytes, new_pair, store_tensors
from strategies.tables import PageTables

Spans = tuple[tuple[int, int, int], ...]


class Sight(Protocol):
    """What a lane must know about its queries: a `Mask` says it, and so does any other rule of the same shape.

    window: the query at i needs no row below i - window + 1, sinks excepted (None: it needs all of them).
    first_visible(i): the first row, sinks excepted, that it does need.
    """

    @property
    def window(self) -> int | None: ...

    @property
    def sinks(self) -> int: ...

    def first_visible(self, position: int) -> int: ...


@dataclass
class Taken:
    """What one plan took from a lane, so that it can be given back."""

    appended: list[tuple[int, int]] = field(default_factory=list)  # (sid, logical pages before)
    copied: list[tuple[int, int, int]] = field(default_factory=list)  # (sid, index, the page it replaced)


class Lane:
    """One pool of pages for `layers`, which all have the same `mask`. The lane keeps what `slack` tokens of rewind need."""

    def __init__(
        self,
        cache: KVCache,
        mask: Sight,
        layers: list[int],
        page_size: int,
        slack: int,
        codecs: tuple[Codec, Codec],
        number: int = 0,
        index: PrefixIndex | None = None,
    ) -> None:
        self.mask = mask
        self.layers = layers
        self.number = number
        self._cache = cache
        self._page_size = page_size
        self._slack = slack
        self._codecs = codecs
        self.page_bytes = page_size * sum(row_bytes(cache.geometry, layer, *codecs) for layer in layers)
        self._index = index
        self.pool = PagePool(0, None if index is None else lambda page: index.forget(number, page))
        self.tables = PageTables()
        self.stores: dict[int, tuple[RowStore, RowStore]] = {}
        self._expect: dict[int, int] = {}  # sid -> the longest length it may reach; 0 when nobody said: paid for as it grows
        self._chunk = 1  # the longest span seen so far
        self.generation = 0  # how often the stores were replaced by new ones, at other addresses

    def allocate(self, pages: int) -> None:
        """Own `pages` usable pages and the scratch page; rows already held keep their ids and bytes."""
        old, rows = self.stores, (pages + 1) * self._page_size
        self.stores = {layer: new_pair(self._cache, layer, rows, self._page_size, self._codecs) for layer in self.layers}
        self.generation += 1
        self.pool.grow(pages - self.pool.capacity)
        for layer, pair in old.items():
            copy_rows([pair], 0, [self.stores[layer]], 0, pair[0].codes.shape[0])

    def resize(self, pages: int) -> None:
        """Own exactly `pages` usable pages, fewer than before: those in use are moved together, cached ones are lost."""
        old, rows = self.stores, (pages + 1) * self._page_size
        self.stores = {layer: new_pair(self._cache, layer, rows, self._page_size, self._codecs) for layer in self.layers}
        self.generation += 1
        moved = self.pool.compact(pages)
        self.tables.renumber(moved)
        if self._index is not None:
            self._index.renumber(self.number, moved)
        for layer, pair in old.items():
            for before, after in zip(store_tensors([pair]), store_tensors([self.stores[layer]]), strict=True):
                copy_moved(before, after, moved, after.shape[0] // (pages + 1))

    def peak_pages(self, length: int, chunk: int) -> int:
        """Pages that a sequence which grows to `length`, at most `chunk` tokens a step, maps at its worst moment."""
        pages = -(-length // self._page_size)
        if self.mask.window is None:
            return pages
        rows = self.mask.window - 1 + self._slack + min(chunk, length)
        sliding = -(-(rows - 1) // self._page_size) + 1
        return min(pages, sliding + -(-self.mask.sinks // self._page_size))

    def open(self, sid: int, expect: int, adopted: Sequence[Mapping[int, int]]) -> None:
        """An empty table, or one that maps the pages of an adopted prefix; those that slid out stay unmapped."""
        self.tables.open(sid)
        self._expect[sid] = expect
        needed = self._needed_pages(len(adopted))
        pages = [pages[self.number] if index in needed else SCRATCH for index, pages in enumerate(adopted)]
        self.pool.share(page for page in pages if page != SCRATCH)
        self.tables.append(sid, pages)

    def holds(self, chain: Sequence[Mapping[int, int]]) -> bool:
        """Whether every page that a continuation after `chain` may read, rewind slack included, is still published here."""
        return all(self.number in chain[index] for index in self._needed_pages(len(chain)))

    def fork(self, sid: int, child: int) -> None:
        pages = self.tables.gather([sid], self.tables.count(sid))[0, : self.tables.count(sid)].tolist()
        self.tables.open(child)
        self._expect[child] = self._expect[sid]
        self.pool.share(page for page in pages if page != SCRATCH)
        self.tables.append(child, pages)

    def close(self, sid: int) -> None:
        # Last pages first: when cached pages run out, the deepest of a chain goes before the ones it hangs on.
        self.pool.release(reversed(self.tables.mapped(sid)))
        self.tables.close(sid)
        del self._expect[sid]

    def missing(self, sid: int, length: int) -> int | None:
        """A position that a continuation at `length` may read and whose page is gone; None when all are held."""
        first = self.mask.first_visible(length)
        for logical in range(first // self._page_size, -(-length // self._page_size)):
            if self.tables.page(sid, logical) == SCRATCH:
                return max(first, logical * self._page_size)
        return None

    def truncate(self, sid: int, length: int) -> None:
        self.pool.release(reversed(self.tables.cut(sid, -(-length // self._page_size))))

    def reserve(self, spans: Spans) -> None:
        """Without a budget: own what is mapped, what these spans need and what every open sequence expects to map beyond that."""
        self._chunk = max(self._chunk, *(stop - start for _, start, stop in spans))
        stops = {sid: stop for sid, _, stop in spans}
        peaks = {sid: self.peak_pages(max(expect, stops.get(sid, 0)), self._chunk) for sid, expect in self._expect.items()}
        if self.mask.window is None:  # what is shared stays shared
            more = sum(max(0, peak - self.tables.count(sid)) for sid, peak in peaks.items())
            wanted = self.pool.owned + len(self._shared_tails(spans)) + more
        else:
            expected = sum(peaks[sid] for sid, expect in self._expect.items() if expect)
            wanted = max(expected, self.pool.owned + self.wanted_pages(spans))
        if wanted > self.pool.capacity:
            self.allocate(wanted)

    def short_pages(self, spans: Spans) -> int:
        """Pages that these spans need beyond those available. Changes nothing."""
        return max(0, self.wanted_pages(spans) - self.pool.available)

    def wanted_pages(self, spans: Spans) -> int:
        """Pages that these spans have to take. Changes nothing."""
        more = sum(-(-stop // self._page_size) - self.tables.count(sid) for sid, _, stop in spans)
        return more + len(self._shared_tails(spans))

    def take(self, spans: Spans) -> Taken:
        """Map the pages that these spans need; a writer whose partial page is shared gets a copy of it."""
        taken = Taken()
        tails = self._shared_tails(spans)
        copies = self.pool.take(len(tails))
        for (sid, index), page in zip(tails, copies, strict=True):
            taken.copied.append((sid, index, self.tables.page(sid, index)))
            self.tables.set(sid, index, page)
        if copies:
            device = self._cache.geometry.device
            sources, targets = (torch.tensor(ids, device=device) for ids in ([old for _, _, old in taken.copied], copies))  # [n] int64
            self._cache.ops.copy_pages(flat(list(self.stores.values())), sources, targets)
        for sid, start, stop in spans:
            before = self.tables.count(sid)
            if start % self._page_size:
                self.pool.retract(self.tables.page(sid, start // self._page_size))
            more = -(-stop // self._page_size) - before
            if more:
                taken.appended.append((sid, before))
                self.tables.append(sid, self.pool.take(more))
        return taken

    def settle(self, taken: Taken) -> None:
        """The step happened: the pages that were copied lose one owner."""
        self.pool.release(old for _, _, old in taken.copied)

    def undo(self, taken: Taken) -> None:
        """The step did not happen: what it took goes back."""
        for sid, before in taken.appended:
            self.pool.release(reversed(self.tables.cut(sid, before)))
        for sid, index, old in taken.copied:
            self.pool.release([self.tables.page(sid, index)])
            self.tables.set(sid, index, old)

    def slide(self, sid: int, length: int, lowest: int) -> None:
        """Give back pages that neither a query from `length` on nor one from `lowest` (the deepest rewind) on may see."""
        if self.mask.window is not None:
            first = self.mask.first_visible(max(0, min(length, lowest)))
            self.pool.release(reversed(self.tables.clear(sid, self._sink_pages(), first // self._page_size)))

    def publish(self, node: Node, sid: int, logical: int) -> None:
        page = self.tables.page(sid, logical)
        if page != SCRATCH and self._index.publish(node, self.number, page):
            self.pool.publish(page)

    def addresses(self, packed: Packed) -> tuple[np.ndarray, np.ndarray]:
        """slots [T] int64 to write and page tables [B, P] int32 to read for these spans; pads have the scratch page to themselves."""
        sids = [sid for sid, _, _ in packed.spans]
        longest = max(stop for _, _, stop in packed.spans) if packed.bound is None else packed.bound
        pages = self.tables.gather(sids, -(-longest // self._page_size))
        if packed.pads:
            pages = np.concatenate((pages, np.full((packed.pads, pages.shape[1]), SCRATCH, dtype=pages.dtype)))
        span = np.repeat(np.arange(len(pages)), packed.counts)  # [T]
        logical, offset = np.divmod(packed.positions, self._page_size)
        if packed.pads:  # each in a row of its own, as long as there are any
            offset[-packed.pads :] = np.arange(packed.pads) % self._page_size
        return pages[span, logical].astype(np.int64) * self._page_size + offset, pages

    def stats(self, lengths: Mapping[int, int]) -> Stats:
        reserved = held_bytes(list(self.stores.values()))
        bytes_per_row = self.page_bytes // self._page_size
        live = self._live_rows(lengths) * bytes_per_row
        return Stats(reserved, self.pool.owned * self.page_bytes, live, self.pool.cached * self.page_bytes)

    def tensors(self) -> list[torch.Tensor]:
        return store_tensors(list(self.stores.values()))

    def _live_rows(self, lengths: Mapping[int, int]) -> int:
        if self.pool.shared == 0:
            return sum(live_union(self.mask, (length,)) for length in lengths.values())
        seen = np.zeros((self.pool.capacity + 1) * self._page_size, dtype=bool)  # by row of the stores
        for sid, length in lengths.items():
            first = self.mask.first_visible(length)
            positions = np.concatenate((np.arange(min(self.mask.sinks, first)), np.arange(first, length)))
            logical, offset = np.divmod(positions, self._page_size)
            pages = self.tables.gather([sid], self.tables.count(sid))[0].astype(np.int64)
            seen[pages[logical] * self._page_size + offset] = True
        return int(np.count_nonzero(seen))

    def _shared_tails(self, spans: Spans) -> list[tuple[int, int]]:
        """(sid, logical page) of each span that starts inside a page which others map too."""
        return [
            (sid, start // self._page_size)
            for sid, start, _ in spans
            if start % self._page_size and self.pool.refs(self.tables.page(sid, start // self._page_size)) > 1
        ]

    def _sink_pages(self) -> int:
        return -(-self.mask.sinks // self._page_size)

    def _needed_pages(self, count: int) -> set[int]:
        """Logical pages that a continuation after `count` whole pages may read, rewind slack included."""
        length = count * self._page_size
        first = self.mask.first_visible(max(0, length - self._slack)) // self._page_size
        return set(range(min(self._sink_pages(), count))) | set(range(first, count))
