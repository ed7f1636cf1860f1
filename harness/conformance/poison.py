"""Ops that put poison wherever a step has no business to read, and watch that a write stays where it belongs.

It does not know which sequence a row belongs to: a row is clean for one attend when the page table or base that the strategy
gave leads a query of that attend to it, and poisoned otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from harness.conformance.oracle import visible
from kernels.api import Ops
from kernels.codec import Codec
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

FILLS = (float("nan"), float("inf"), float("-inf"), 65504.0, -1e4)


class Planted(RuntimeError):
    """A kernel failed on purpose."""


class PoisonOps(Ops):
    """The ops of `inner`. New rows hold `fill`, and during an attend so does every row that no query of it may see."""

    def __init__(self, inner: Ops, fill: float = float("nan")) -> None:
        super().__init__(inner.name, inner._module)
        self.fill = fill
        self.fuse: int | None = None  # calls until one of them raises `Planted`

    def new_rows(
        self, codec: Codec, count: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str, page_size: int | None
    ) -> RowStore:
        store = super().new_rows(codec, count, heads, head_dim, dtype, device, page_size)
        _fill(store, slice(None), float("nan"))
        return store

    def write_rows(self, store: RowStore, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self._burn()
        names = slots.tolist()
        assert len(set(names)) == len(names), f"one step writes a row twice: slots {sorted(names)}"
        assert all(0 <= slot < store.count for slot in names), f"slots {names} leave the store of {store.count} rows"
        before = [part.clone() for part in _bytes(store)]
        super().write_rows(store, slots, rows)
        for old, new in zip(before, _bytes(store), strict=True):
            old[slots] = new[slots]
            assert torch.equal(old, new), f"writing rows {names} changed rows outside them"

    def attend_dense(
        self,
        q: torch.Tensor,
        keys: RowStore,
        values: RowStore,
        where: DenseRows,
        batch: Batch,
        mask: Mask,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        self._burn()
        assert where.bases.tolist() == list(where.host), f"bases on the device {where.bases.tolist()} and on the host {where.host} differ"
        readable = _readable(batch.spans, mask, lambda span, positions: where.host[span] + positions)
        with self._poisoned(keys, readable), self._poisoned(values, readable):
            return super().attend_dense(q, keys, values, where, batch, mask, scale, softcap)

    def attend_paged(
        self,
        q: torch.Tensor,
        keys: RowStore,
        values: RowStore,
        where: PagedRows,
        batch: Batch,
        mask: Mask,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        self._burn()
        pages, size = where.pages.cpu().numpy().astype(np.int64), where.page_size

        def slots_of(span: int, positions: np.ndarray) -> np.ndarray:
            return pages[span][positions // size] * size + positions % size

        asked = len(batch.spans) - batch.pads
        assert all(slot >= size for slot in _readable(batch.spans[:asked], mask, slots_of)), "a query reads the scratch page"
        pads = [pages[span, 0] for span in range(asked, len(batch.spans))]
        assert all(page == 0 for page in pads), f"pads read pages {pads} and not the scratch page"
        readable = _readable(batch.spans, mask, slots_of)
        with self._poisoned(keys, readable), self._poisoned(values, readable):
            return super().attend_paged(q, keys, values, where, batch, mask, scale, softcap)

    def _burn(self) -> None:
        if self.fuse is None:
            return
        self.fuse -= 1
        if self.fuse < 0:
            self.fuse = None
            raise Planted("a kernel failed on purpose")

    @contextmanager
    def _poisoned(self, store: RowStore, readable: set[int]) -> Iterator[None]:
        assert all(0 <= slot < store.count for slot in readable), f"a query reads row {max(readable)} of a store of {store.count}"
        slots = [slot for slot in range(store.count) if slot not in readable]
        saved = [part.clone() for part in _bytes(store)]
        _fill(store, torch.tensor(slots, dtype=torch.int64, device=store.codes.device), self.fill)
        try:
            yield
        finally:
            for part, old in zip(_bytes(store), saved, strict=True):
                part.copy_(old)


def _fill(store: RowStore, rows: slice | torch.Tensor, fill: float) -> None:
    """`fill` in the floating parts of these rows; the largest number in codes that are integers."""
    for part in (store.codes, store.scales):
        if part is None:
            continue
        part[rows] = torch.tensor(fill if part.is_floating_point() else torch.iinfo(part.dtype).max).to(part.dtype)


def _bytes(store: RowStore) -> list[torch.Tensor]:
    """The tensors of a store as bytes, which compare equal where NaN does not. The leading axis is rows, as `RowStore` says."""
    return [part.view(torch.uint8) for part in (store.codes, store.scales) if part is not None]


def poison_free_memory(tensors: list[torch.Tensor]) -> None:
    """NaN in every floating tensor of a cache that holds no live sequence and no prefix. Integer tensors may be tables: untouched."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def _readable(spans: Sequence[tuple[int, int]], mask: Mask, slots_of: Callable[[int, np.ndarray], np.ndarray]) -> set[int]:
    """Rows that at least one query of these spans may see."""
    slots: set[int] = set()
    for span, (start, stop) in enumerate(spans):
        seen = visible(np.arange(start, stop), np.arange(stop), mask.window, mask.sinks).any(0)
        slots.update(slots_of(span, np.nonzero(seen)[0]).tolist())
    return slots
