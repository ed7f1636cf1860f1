"""The public ops: signatures, shape and dtype checks, and a count of what really ran.

Every op is checked here once, so that backends hold arithmetic only. Shapes: T packed tokens, B spans, Hq query heads,
Hkv KV heads, D head_dim, N stored rows.
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import torch

from kernels.chained import Chain, ChainModel
from kernels.codec import Codec
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

ACTIVATIONS = ("silu", "gelu_tanh")


class Ops:
    """The ops of one backend, resolved once. `calls` counts each op that ran, for the record's activation proof."""

    def __init__(self, name: str, module: ModuleType) -> None:
        self.name = name
        self._module = module
        self.calls: Counter[str] = Counter()

    @property
    def flavour(self) -> str | None:
        """In the backend's own words, which variant of it runs here; None for a backend that has one only."""
        return getattr(self._module, "FLAVOUR", None)

    @property
    def rounds_decoded(self) -> bool:
        """Whether attention rounds what a codec reads back to the working dtype before it multiplies."""
        return getattr(self._module, "ROUNDS_DECODED", False)

    def source(self, op: str) -> str | None:
        """The module whose code runs when `op` is called; None for an op that a strategy counts but computes itself."""
        function = getattr(self._module, op, None)
        return None if function is None else function.__module__

    def new_rows(
        self, codec: Codec, count: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str, page_size: int | None
    ) -> RowStore:
        """An uninitialised store of `count` rows ([count, heads, head_dim] once decoded) in this backend's layout."""
        return self._module.new_rows(codec, count, heads, head_dim, dtype, device, page_size)

    def read_rows(self, store: RowStore, slots: torch.Tensor) -> torch.Tensor:
        """Decode rows `slots` [n] int64 -> [n, heads, head_dim] in the working dtype. For tests, audits and growth; not a hot path."""
        self.calls["read_rows"] += 1
        return self._module.read_rows(store, slots)

    def write_rows(self, store: RowStore, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Encode rows [T, heads, head_dim] into `slots` [T] int64. K is taken as given (already rotated or not).

        Slots are distinct, but for those of pads, which may share scratch rows: what such a row then holds is any of them.
        """
        _same("rows", tuple(rows.shape), "its slots and store", (slots.shape[0], store.heads, store.head_dim))
        _same("rows dtype", rows.dtype, "the store's working dtype", store.dtype)
        self.calls["write_rows"] += 1
        self._module.write_rows(store, slots, rows)

    def copy_pages(self, stores: list[RowStore], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole pages sources[i] -> targets[i] ([n] int64, disjoint sets) as bytes, in every store given."""
        _same("sources", tuple(sources.shape), "targets", tuple(targets.shape))
        if any(store.page_size is None for store in stores):
            raise ValueError("copy_pages needs paged stores; one of these is addressed by row")
        self.calls["copy_pages"] += 1
        self._module.copy_pages(stores, sources, targets)

    def move_rows(self, stores: list[RowStore], source: int, target: int, count: int) -> None:
        """Copy `count` rows from row `source` to row `target` as bytes (the ranges may overlap), in every store given."""
        self.calls["move_rows"] += 1
        self._module.move_rows(stores, source, target, count)

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
        """Softmax attention of q [T, Hq, D] over rows that lie one after another -> [T, Hq, D] in q's dtype."""
        _check_attend(q, keys, values, batch)
        self.calls["attend_dense"] += 1
        return self._module.attend_dense(q, keys, values, where, batch, mask, scale, softcap)

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
        """Softmax attention of q [T, Hq, D] over rows found through a page table -> [T, Hq, D] in q's dtype."""
        _check_attend(q, keys, values, batch)
        _same("the table's page_size", where.page_size, "the store's", keys.page_size)
        self.calls["attend_paged"] += 1
        return self._module.attend_paged(q, keys, values, where, batch, mask, scale, softcap)

    def attend_packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, mask: Mask, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """Attention of q [T, Hq, D] over the k, v [T, Hkv, D] of the same step, nothing stored; every span starts at position 0."""
        _same("k", tuple(k.shape), "v", tuple(v.shape))
        if any(start for start, _ in batch.spans):
            raise ValueError(f"attend_packed sees only this step's tokens, so each span must start at 0; got spans {batch.spans}")
        self.calls["attend_packed"] += 1
        return self._module.attend_packed(q, k, v, batch, mask, scale, softcap)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, H, D] by its positions: lane d < R is paired with lane R + d. cos, sin [T, R]. RoFormer, Su et al. 2021."""
        _same("cos", tuple(cos.shape), "sin", tuple(sin.shape))
        if cos.shape[0] != x.shape[0] or 2 * cos.shape[1] > x.shape[2]:
            raise ValueError(
                f"rope: x {tuple(x.shape)} and cos {tuple(cos.shape)} disagree: "
                f"need cos [T, R] with T = {x.shape[0]} and 2R <= {x.shape[2]}"
            )
        self.calls["rope"] += 1
        return self._module.rope(x, cos, sin)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(y, r): r = x + residual (x itself when there is none), y = r / rms(r) * weight over the last axis. Zhang & Sennrich 2019."""
        _same("weight", weight.shape[0], "the last axis of x", x.shape[-1])
        self.calls["rms_norm"] += 1
        return self._module.rms_norm(x, weight, eps, residual)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """act(gate) * up for gate_up [T, 2F] (gate first) -> [T, F]. Shazeer 2020."""
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}: choose one of {', '.join(ACTIVATIONS)}")
        self.calls["gated"] += 1
        return self._module.gated(gate_up, activation)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N]. torch's product, unless the backend has one of its own."""
        product = getattr(self._module, "linear", None)
        if product is None:
            return torch.nn.functional.linear(x, weight, bias)
        _same("x", x.shape[-1], "the weight's columns", weight.shape[1])
        self.calls["linear"] += 1
        return product(x, weight, bias)

    def chained(self, model: ChainModel, tokens: int) -> Chain | None:
        """What a decode step of `tokens` rows computes between its attentions, with the ops' own numbers; None where the backend
        has no such thing. Whoever runs it counts the `calls`."""
        make = getattr(self._module, "chained", None)
        return None if make is None else make(model, tokens)


def _same(name: str, got: object, other: str, want: object) -> None:
    if got != want:
        raise ValueError(f"{name} {got} does not match {other} {want}")


def _check_attend(q: torch.Tensor, keys: RowStore, values: RowStore, batch: Batch) -> None:
    _same("q", (q.shape[0], q.shape[2]), "[tokens, head_dim] of the batch and store", (batch.tokens, keys.head_dim))
    _same("the key store", (keys.heads, keys.head_dim, keys.count), "the value store", (values.heads, values.head_dim, values.count))
    _same("q dtype", q.dtype, "the store's working dtype", keys.dtype)
    if q.shape[1] % keys.heads:
        raise ValueError(f"{q.shape[1]} query heads cannot share {keys.heads} KV heads evenly")
