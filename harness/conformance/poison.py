"""Ops that put poison wherever a step has no business to read, and watch that a write stays where it belongs.

Everything goes through the ops themselves, so no layout is assumed. It does not know which sequence a row belongs to: a row
is clean for one attend when the page table or base that the strategy gave leads a query of that attend to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from harness.conformance.oracle import visible
from kernels.api import Ops
from kernels.codec import Codec
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

FILLS = (float("nan"), float("inf"), float("-inf"), 65504.0, -1e4)


class PoisonOps(Ops):
    """The ops of `inner`. New rows hold `fill`, and during an attend so does every row that no query of it may see."""

    def __init__(self, inner: Ops, fill: float = float("nan")) -> None:
        super().__init__(inner.name, inner._module)
        self.fill = fill

    def new_rows(
        self, codec: Codec, count: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str, page_size: int | None
    ) -> RowStore:
        store = super().new_rows(codec, count, heads, head_dim, dtype, device, page_size)
        for tensor in (store.codes, store.scales):
            if tensor is not None and tensor.is_floating_point():
                tensor.fill_(float("nan"))
        return store

    def write_rows(self, store: RowStore, slots: torch.Tensor, rows: torch.Tensor) -> None:
        names = slots.tolist()
        assert len(set(names)) == len(names), f"one step writes a row twice: slots {sorted(names)}"
        assert all(0 <= slot < store.count for slot in names), f"slots {names} leave the store of {store.count} rows"
        others = _others(store, names)
        before = self._bytes(store, others)
        super().write_rows(store, slots, rows)
        assert before == self._bytes(store, others), f"writing rows {names} changed rows outside them"

    def attend_dense(
        self, q: torch.Tensor, keys: RowStore, values: RowStore, where: DenseRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
    ) -> torch.Tensor:
        assert where.bases.tolist() == list(where.host), f"bases on the device {where.bases.tolist()} and on the host {where.host} differ"
        readable = _readable(batch, mask, lambda span, positions: where.host[span] + positions)
        with self._poisoned(keys, readable), self._poisoned(values, readable):
            return super().attend_dense(q, keys, values, where, batch, mask, scale, softcap)

    def attend_paged(
        self, q: torch.Tensor, keys: RowStore, values: RowStore, where: PagedRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
    ) -> torch.Tensor:
        pages, size = where.pages.cpu().numpy().astype(np.int64), where.page_size
        readable = _readable(batch, mask, lambda span, positions: pages[span][positions // size] * size + positions % size)
        assert all(slot >= size for slot in readable), "a query reads the scratch page"
        with self._poisoned(keys, readable), self._poisoned(values, readable):
            return super().attend_paged(q, keys, values, where, batch, mask, scale, softcap)

    @contextmanager
    def _poisoned(self, store: RowStore, readable: set[int]) -> Iterator[None]:
        assert all(0 <= slot < store.count for slot in readable), f"a query reads row {max(readable)} of a store of {store.count}"
        slots = torch.tensor(_others(store, readable), dtype=torch.int64, device=store.codes.device)
        saved = [tensor.clone() for tensor in (store.codes, store.scales) if tensor is not None]
        filler = torch.full((len(slots), store.heads, store.head_dim), self.fill, dtype=store.dtype, device=store.codes.device)
        super().write_rows(store, slots, filler)
        try:
            yield
        finally:
            for tensor, old in zip((t for t in (store.codes, store.scales) if t is not None), saved, strict=True):
                tensor.copy_(old)

    def _bytes(self, store: RowStore, slots: list[int]) -> bytes:
        rows = self._module.read_rows(store, torch.tensor(slots, dtype=torch.int64, device=store.codes.device))
        return rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def poison_free_memory(tensors: list[torch.Tensor]) -> None:
    """NaN in every floating tensor of a cache that holds no live sequence and no prefix. Integer tensors may be tables: untouched."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def _readable(batch: Batch, mask: Mask, slots_of: Callable[[int, np.ndarray], np.ndarray]) -> set[int]:
    """Rows that at least one query of the batch may see."""
    slots: set[int] = set()
    for span, (start, stop) in enumerate(batch.spans):
        seen = visible(np.arange(start, stop), np.arange(stop), mask.window, mask.sinks).any(0)
        slots.update(slots_of(span, np.nonzero(seen)[0]).tolist())
    return slots


def _others(store: RowStore, slots: set[int] | list[int]) -> list[int]:
    taken = set(slots)
    return [slot for slot in range(store.count) if slot not in taken]
