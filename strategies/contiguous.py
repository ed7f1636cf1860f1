"""One run of neighbouring rows for each sequence: the classic cache, in the four sizes that real systems give it.

It never drops a row, so it can always rewind. A fork shares its parent's run until one of them writes, then the writer
moves to a run of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.api import Ops
from kernels.codec import codec_named
from kernels.rows import DenseRows
from strategies.base import History, KVCache, Packed, Plan, row_bytes
from strategies.extents import Extents
from strategies.geometry import CacheFull, Geometry, HeadSharing, Refused, Stats
from strategies.masks import live_union
from strategies.stores import Stores, copy_rows, flat, held_bytes, new_pair, store_tensors

SLABS = ("max", "pow2", "exact", "growth")
SMALLEST_POW2 = 16  # rows


@dataclass
class Run:
    """Rows first..first+rows-1 of the arena. Sequences that share it map the same object."""

    first: int
    rows: int


@dataclass(frozen=True)
class Placement:
    """The private half of a plan."""

    slots: torch.Tensor  # [T] int64, the row that each packed token is written to
    where: DenseRows
    moved: dict[int, Run | None]  # sid -> the run it had before this plan


class Contiguous(KVCache):
    """`slab` decides how many rows a sequence gets.

    max: the model's whole context. pow2: the expected length rounded up to a power of two. exact: the expected length.
    growth: a power of two that doubles, in place where the rows behind are free and else by moving, when the sequence outgrows it.
    A sequence that was opened without `expect`, or passes it, is moved the same way. A run is found when the sequence is
    first planned. With a budget the arena is fixed and first fit can fragment it; without one it is rebuilt to fit exactly.
    Pads share one row behind the arena, once `reserve_scratch` has made it.
    """

    capturable = True

    def __init__(
        self,
        geometry: Geometry,
        budget_bytes: int | None,
        backend: Ops,
        *,
        slab: str = "exact",
        codec_k: str = "raw",
        codec_v: str = "raw",
        heads: HeadSharing | None = None,
    ) -> None:
        super().__init__(geometry, budget_bytes, backend)
        if slab not in SLABS:
            raise Refused(f"slab={slab!r}: choose one of {', '.join(SLABS)}")
        self.slab = slab
        self.codec_k, self.codec_v, self.heads = codec_named(codec_k), codec_named(codec_v), heads
        self._layer_bytes = [row_bytes(geometry, layer, self.codec_k, self.codec_v) for layer in range(len(geometry.layers))]
        self._row_bytes = sum(self._layer_bytes)
        self._generation = 0  # how often the stores were replaced by new ones, at other addresses
        self._build_arena(0)
        self._runs: dict[int, Run | None] = {}
        self._expect: dict[int, int] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        keys, values = self._stores[layer]
        placement: Placement = plan.private
        self.ops.write_rows(keys, placement.slots, k)
        self.ops.write_rows(values, placement.slots, v)
        return self.ops.attend_dense(
            q, keys, values, placement.where, plan.batch, self.mask(layer), self.geometry.scale, self.geometry.softcap
        )

    def stats(self) -> Stats:
        rows: dict[int, int] = {}  # first row of a run -> its rows
        lengths: dict[int, set[int]] = {}  # first row of a run -> lengths of the histories that read it
        for sid, run in self._runs.items():
            if run is not None:
                rows[run.first] = run.rows
                lengths.setdefault(run.first, set()).add(self._histories[sid].length)
        live = sum(
            layer_bytes * live_union(self.mask(layer), shared)
            for layer, layer_bytes in enumerate(self._layer_bytes)
            for shared in lengths.values()
        )
        return Stats(held_bytes(self._stores), sum(rows.values()) * self._row_bytes, live, 0)

    def bytes_for(self, lengths: Sequence[int], chunk: int = 1) -> int:
        return self._row_bytes * (self._scratch + sum(self._wanted(length, length) for length in lengths))

    def tensors(self) -> list[torch.Tensor]:
        return store_tensors(self._stores)

    def _wanted(self, expect: int, stop: int) -> int:
        """Rows that a sequence which must reach `stop` gets."""
        if self.slab == "max":
            return self.geometry.context
        if self.slab == "exact":
            return max(expect, stop)
        rows = SMALLEST_POW2
        while rows < (stop if self.slab == "growth" else max(expect, stop)):
            rows *= 2
        return min(rows, self.geometry.context)

    def _opened(self, sid: int, history: History, prompt: Sequence[int], expect: int | None) -> None:
        self._expect[sid] = 0 if expect is None else min(expect, self.geometry.context)
        self._runs[sid] = None
        self._histories[sid] = history

    def _forked(self, sid: int, child: int) -> None:
        self._runs[child] = self._runs[sid]
        self._expect[child] = self._expect[sid]

    def _truncated(self, sid: int, length: int) -> None:
        pass

    def _closed(self, sid: int) -> None:
        run = self._runs.pop(sid)
        del self._expect[sid]
        self._give_back(run)

    def _scratch_reserved(self) -> None:
        self._build_arena(1)

    def _build_arena(self, scratch: int) -> None:
        """The arena and its stores, empty, with `scratch` rows behind it: all that the budget holds, or nothing yet. Refused, and no
        change, when that is no token."""
        rows = 0 if self.budget_bytes is None else self.budget_bytes // self._row_bytes - scratch
        if self.budget_bytes is not None and rows < 1:
            beside = " and the scratch row" if scratch else ""
            needed = (1 + scratch) * self._row_bytes
            raise Refused(f"a budget of {self.budget_bytes} bytes holds no token: one token{beside} takes {needed} bytes; raise the budget")
        self._scratch = scratch
        self._arena = Extents(rows)
        self._stores = self._new_stores(rows)

    def _planned(self, spans: tuple[tuple[int, int, int], ...], pad_to: int | None = None) -> Plan:
        owners = Counter(id(run) for run in self._runs.values())
        moving: dict[int, int] = {}  # sid -> rows wanted
        for sid, _, stop in spans:
            run = self._runs[sid]
            if run is None or run.rows < stop or owners[id(run)] > 1:
                moving[sid] = max(self._wanted(self._expect[sid], stop), 0 if run is None else run.rows)
        moving = dict(sorted(moving.items(), key=lambda mover: -mover[1]))  # what first fit can place depends on the order: largest first
        alone = {sid for sid in moving if owners[id(self._runs[sid])] == 1 and self._runs[sid] is not None}
        moved = self._make_room(moving, alone) if moving else {}
        packed = Packed(spans, pad_to)
        firsts = [self._runs[sid].first for sid, _, _ in spans] + [self._arena.size] * packed.pads
        bases = np.array(firsts, dtype=np.int64)  # [B]
        slots = packed.positions + np.repeat(bases, packed.counts)  # [T]
        where = DenseRows(self._tensor(packed, "bases", bases), tuple(firsts))
        return self._new_plan(packed, Placement(self._tensor(packed, "slots", slots), where, moved), (self._generation,))

    def _make_room(self, moving: dict[int, int], alone: set[int]) -> dict[int, Run | None]:
        """Give each moving sequence its new run; returns the old ones, which stay owned until commit. A run that one sequence has
        `alone` grows where it is when the rows behind it are free, as realloc does; the others move, rows copied."""
        before = {sid: self._runs[sid] for sid in alone}
        grown = {sid: before[sid] for sid in alone if self._grow(sid, moving[sid])}
        rest = {sid: rows for sid, rows in moving.items() if sid not in grown}
        short = self._arena.missing(list(rest.values()))
        if not short:
            return grown | self._move(rest)
        for sid, old in grown.items():
            self._arena.give(old.first + old.rows, self._runs[sid].rows - old.rows)
            self._runs[sid] = old
        if self.budget_bytes is not None:
            raise CacheFull(short * self._row_bytes, tuple(moving))
        return self._rebuild(moving)

    def _grow(self, sid: int, rows: int) -> bool:
        run = self._runs[sid]
        if not self._arena.extend(run.first + run.rows, rows - run.rows):
            return False
        self._runs[sid] = Run(run.first, rows)
        return True

    def _move(self, moving: dict[int, int]) -> dict[int, Run | None]:
        old = {sid: self._runs[sid] for sid in moving}
        for sid, rows in moving.items():
            self._runs[sid] = Run(self._arena.take(rows), rows)
            if old[sid] is not None:
                self.ops.move_rows(flat(self._stores), old[sid].first, self._runs[sid].first, self._histories[sid].length)
        return old

    def _rebuild(self, moving: dict[int, int]) -> dict[int, Run | None]:
        """A new arena that fits exactly. A run that only moving sequences map is not kept: should the plan be aborted, the front
        of a new run stands in for it, that of the mover with the longest history, which writes behind all of its rows."""
        before = {sid: replace(run) for sid, run in self._runs.items() if run is not None}
        longest: dict[int, int] = {}  # first row of an old run -> rows that its longest history fills
        for sid, run in before.items():
            longest[run.first] = max(longest.get(run.first, 0), self._histories[sid].length)
        old = {sid: self._runs[sid] for sid in moving}
        kept = {id(run): run for sid, run in self._runs.items() if run is not None and sid not in moving}
        size = sum(run.rows for run in kept.values()) + sum(moving.values())
        self._arena, stores = Extents(size), self._new_stores(size)
        self._generation += 1
        for run in kept.values():
            run.first = self._arena.take(run.rows)
        for sid, rows in sorted(moving.items(), key=lambda mover: -self._histories[mover[0]].length):
            self._runs[sid] = Run(self._arena.take(rows), rows)
            if old[sid] is not None and id(old[sid]) not in kept:
                kept[id(old[sid])] = old[sid]
                old[sid].first = self._runs[sid].first
        for sid, run in before.items():
            copy_rows(self._stores, run.first, stores, self._runs[sid].first, longest[run.first])
        self._stores = stores
        return old

    def _committed(self, plan: Plan, token_ids: Sequence[int]) -> None:
        for run in {id(run): run for run in plan.private.moved.values()}.values():
            self._give_back(run)

    def _aborted(self, plan: Plan) -> None:
        for sid, old in plan.private.moved.items():
            new, self._runs[sid] = self._runs[sid], old
            overlap = old.rows if old is not None and old.first == new.first else 0
            if new.rows > overlap:
                self._arena.give(new.first + overlap, new.rows - overlap)

    def _give_back(self, run: Run | None) -> None:
        """Free `run` once no sequence maps its rows any more, nor would after an abort of the open plan."""
        moved = {} if self._open_plan is None else self._open_plan.private.moved
        if run is not None and all(other is None or other.first != run.first for other in (*self._runs.values(), *moved.values())):
            self._arena.give(run.first, run.rows)

    def _new_stores(self, rows: int) -> Stores:
        """Empty stores of `rows` rows and the scratch row, if there is one."""
        held, codecs = rows + self._scratch, (self.codec_k, self.codec_v)
        return [new_pair(self, layer, held, None, codecs) for layer in range(len(self.geometry.layers))]
