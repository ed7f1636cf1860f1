"""KIVI (Liu et al. 2024): 2- or 4-bit groups of old tokens, keys per channel, and a full-precision tail of recent ones.

It does not know how attention is computed beyond plain torch: there is no fused kernel for this format, whatever the backend.

What the query at position i reads depends on i alone, never on how the tokens were fed: tokens below
aged(i) = group * floor(max(0, i + 1 - residual) / group) through the codec of `kivi_codec.py`, the others as they came.
We depart from the paper's code in this: there, a prompt longer than the residual is quantised at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from kernels.api import Ops
from kernels.codec import codec_named
from kernels.reference import attend_one, compute_dtype
from strategies.base import History, KVCache, Packed, Plan
from strategies.budget import rebalance, split
from strategies.codes import CodePages
from strategies.geometry import CannotRewind, Geometry, HeadSharing, Refused, Stats
from strategies.lanes import Lane, Taken


@dataclass(frozen=True)
class Residual:
    """Which raw rows a sequence must keep, in the words of a lane: all that the plan of its next query has to read or to code.

    A group stays raw until the first plan whose queries read it through the codec, so these begin at aged(position - 1).
    """

    group: int
    residual: int
    sinks: int = 0

    @property
    def window(self) -> int:
        return self.residual + self.group

    def aged(self, position: int) -> int:
        return self.group * (max(0, position + 1 - self.residual) // self.group)

    def first_visible(self, position: int) -> int:
        return self.aged(position - 1)


@dataclass(frozen=True)
class GroupFormat:
    """The name that records show for a format which has no per-row size."""

    name: str


@dataclass(frozen=True)
class Placement:
    """The private half of a plan."""

    slots: torch.Tensor  # [T] int64, rows of the raw stores to write
    raw_pages: torch.Tensor  # [B, P] int32
    taken: Taken
    folded: dict[int, tuple[int, int]]  # sid -> groups coded before and after this plan


class Kivi(KVCache):
    """bits: 2 or 4. group: tokens that share a key scale. residual: recent tokens that stay as they came. value_group: channels
    that share a value scale. slack: tokens that `truncate` can always take back, counted from the longest length."""

    def __init__(
        self,
        geometry: Geometry,
        budget_bytes: int | None,
        backend: Ops,
        *,
        bits: int = 4,
        group: int = 32,
        residual: int = 128,
        value_group: int = 32,
        slack: int = 0,
        heads: HeadSharing | None = None,
    ) -> None:
        super().__init__(geometry, budget_bytes, backend)
        if bits not in (2, 4):
            raise Refused(f"bits={bits}: kivi packs 2 or 4 bits")
        for name, value, least in (("group", group, 1), ("residual", residual, 1), ("value_group", value_group, 1), ("slack", slack, 0)):
            if value < least:
                raise Refused(f"{name}={value}: use {least} or more")
        windows = {layer.window for layer in geometry.layers} - {None}
        if windows:
            raise Refused(f"kivi keeps all groups, and this model's layers have windows of {sorted(windows)}: use a paged strategy")
        self.bits, self.group, self.residual, self.value_group, self.slack = bits, group, residual, value_group, slack
        self.heads = heads
        self.rewind = slack
        self.codec_k, self.codec_v = GroupFormat(f"kivi{bits}_channel"), GroupFormat(f"kivi{bits}_token")
        self._codes = CodePages(geometry, bits, group, value_group)
        raw = codec_named("raw")
        self._raw = Lane(self, Residual(group, residual), list(range(len(geometry.layers))), group, slack, (raw, raw))
        self._pools = (self._codes, self._raw)
        pages = (0, 0) if budget_bytes is None else split(self._pools, budget_bytes, self._pages_for, geometry.context)
        for pool, count in zip(self._pools, pages, strict=True):
            pool.allocate(count)

    def aged(self, position: int) -> int:
        return self._raw.mask.aged(position)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        self.ops.calls["attend_kivi"] += 1
        placement: Placement = plan.private
        keys, values = self._raw.stores[layer]
        self.ops.write_rows(keys, placement.slots, k)
        self.ops.write_rows(values, placement.slots, v)
        out = torch.empty_like(q)
        at = 0
        for b, (sid, start, stop) in enumerate(plan.spans):
            raw = [store.codes.unflatten(0, (-1, self.group)) for store in (keys, values)]  # [pages, G, H, D] each
            pages = placement.raw_pages[b].long()
            for logical in range(*placement.folded[sid]):
                self._codes.write(layer, sid, logical, *(rows[pages[logical]] for rows in raw))
            rows = slice(at, at + stop - start)
            out[rows] = self._one_span(layer, sid, q[rows], start, stop, [r[pages[: -(-stop // self.group)]].flatten(0, 1) for r in raw])
            at += stop - start
        return out

    def _one_span(self, layer: int, sid: int, q: torch.Tensor, start: int, stop: int, raw: list[torch.Tensor]) -> torch.Tensor:
        """q [t, Hq, D] at positions start..stop-1; raw K and V [n, Hkv, D], of which rows from aged(start) on are real."""
        dtype = compute_dtype(self.dtype)
        coded = self._codes.read(layer, sid, self.aged(stop - 1) // self.group, dtype)  # ([aged, Hkv, D],) * 2
        out = torch.empty_like(q)
        for aged, positions in groupby(range(start, stop), self.aged):
            queries = torch.tensor(list(positions), device=q.device)
            k, v = (torch.cat((old[:aged], new[aged:stop].to(dtype))) for old, new in zip(coded, raw, strict=True))
            seen = torch.arange(stop, device=q.device)
            mask = self.mask(layer)
            out[queries - start] = attend_one(q[queries - start], k, v, queries, seen, mask, self.geometry.scale, self.geometry.softcap)
        return out

    def stats(self) -> Stats:
        lengths = {sid: history.length for sid, history in self._histories.items()}
        raw = self._raw.stats(lengths)
        groups = {sid: self.aged(length - 1) // self.group for sid, length in lengths.items()}
        reserved, in_use, live = self._codes.stats(groups)
        return Stats(raw.reserved_bytes + reserved, raw.in_use_bytes + in_use, raw.live_bytes + live, 0)

    def bytes_for(self, lengths: Sequence[int], chunk: int = 1) -> int:
        raw = self._raw.page_bytes * (1 + sum(self._raw.peak_pages(length, chunk) for length in lengths))
        coded = sum(self.aged(length - 1) // self.group for length in lengths if length)
        return raw + self._codes.page_bytes * (1 + coded)

    def bytes_per_token(self) -> float:
        """Of an aged token; the recent ones are raw."""
        return self._codes.page_bytes / self.group

    def tensors(self) -> list[torch.Tensor]:
        return self._codes.tensors() + self._raw.tensors()

    def _opened(self, sid: int, history: History, prompt: Sequence[int], expect: int | None) -> None:
        expect = 0 if expect is None else min(expect, self.geometry.context)
        self._codes.open(sid, 0 if expect == 0 else self.aged(expect - 1) // self.group)
        self._raw.open(sid, expect, [])
        self._histories[sid] = history

    def _forked(self, sid: int, child: int) -> None:
        self._codes.fork(sid, child)
        self._raw.fork(sid, child)

    def _truncated(self, sid: int, length: int) -> None:
        missing = self._raw.missing(sid, length)
        if missing is not None:
            raise CannotRewind(
                f"sequence {sid} cannot go back to {length} tokens: that needs token {missing} as it came, and only its codes are "
                f"left; slack={self.slack} allows {max(0, self._histories[sid].high - self.slack)} and above"
            )
        self._raw.truncate(sid, length)
        self._codes.cut(sid, length // self.group)

    def _closed(self, sid: int) -> None:
        self._codes.close(sid)
        self._raw.close(sid)

    def _planned(self, spans: tuple[tuple[int, int, int], ...]) -> Plan:
        groups = {sid: self.aged(stop - 1) // self.group for sid, _, stop in spans}
        if self.budget_bytes is None:
            self._raw.reserve(spans)
            self._codes.reserve(groups)
        elif self._raw.short_pages(spans) or self._codes.short_pages(groups):
            wanted = (self._codes.wanted_pages(groups), self._raw.wanted_pages(spans))
            rebalance(self._pools, wanted, self.budget_bytes, tuple(groups))
        taken = self._raw.take(spans)
        folded = {sid: self._codes.take(sid, count) for sid, count in groups.items()}
        packed = Packed(spans)
        slots, pages = self._raw.addresses(packed)
        return self._new_plan(packed, Placement(self._to_device(slots), self._to_device(pages), taken, folded))

    def _committed(self, plan: Plan, token_ids: Sequence[int]) -> None:
        self._raw.settle(plan.private.taken)
        for sid, _, _ in plan.spans:
            history = self._histories[sid]
            self._raw.slide(sid, history.length, history.high - self.slack)

    def _aborted(self, plan: Plan) -> None:
        self._raw.undo(plan.private.taken)
        for sid, (before, _) in plan.private.folded.items():
            self._codes.cut(sid, before)

    def _pages_for(self, length: int) -> tuple[int, int]:
        """Code pages and raw pages of one sequence of `length` tokens, fed a group at a time."""
        return self.aged(length - 1) // self.group, self._raw.peak_pages(length, self.group)
