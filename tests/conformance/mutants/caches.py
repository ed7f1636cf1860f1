"""Planted faults in the caches: slips in tables, reference counts, rollback, prefixes and accounts, as subclasses of ours.

Each changes one decision. It does not know how they are found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch

from kernels.codec import codec_named
from strategies import paged
from strategies.contiguous import Contiguous
from strategies.extents import Extents
from strategies.geometry import CacheFull, CannotRewind, Stats
from strategies.kivi import Kivi
from strategies.lanes import Lane
from strategies.paged import Paged
from strategies.pages import PagePool
from strategies.prefix import PrefixIndex


def paged_with(**faulty: type) -> Callable[..., Paged]:
    """A paged cache built with some of its parts (Lane, PrefixIndex) replaced."""

    def make(*arguments: object, **parameters: object) -> Paged:
        with mock.patch.multiple(paged, **faulty):
            return Paged(*arguments, **parameters)

    return make


def lane_with_pool(pool: type) -> type:
    """A lane whose page pool is of this class."""

    class FaultyLane(Lane):
        def __init__(self, *arguments: object, **parameters: object) -> None:
            super().__init__(*arguments, **parameters)
            self.pool.__class__ = pool

    FaultyLane.__name__ = pool.__name__
    return FaultyLane


class OnePositionRow(Paged):
    """All spans of a batch are numbered from the longest one's start."""

    def _new_plan(self, *arguments):
        plan = super()._new_plan(*arguments)
        longest = max(start for _, start, _ in plan.spans)
        shift = torch.cat([torch.full((stop - start,), longest - start) for _, start, stop in plan.spans])
        return replace(plan, positions=plan.positions + shift)


class RollbackKeepsCounting(Paged):
    """Positions go on from the longest length, not from where the sequence was cut."""

    def _new_plan(self, *arguments):
        plan = super()._new_plan(*arguments)
        over = [max(0, self._histories[sid].high - start) for sid, start, _ in plan.spans]
        shift = torch.cat([torch.full((stop - start,), more) for more, (_, start, stop) in zip(over, plan.spans, strict=True)])
        return replace(plan, positions=plan.positions + shift)


class ForksCountTwice(Paged):
    """The token at which a child was forked is numbered twice."""

    def _forked(self, sid, child):
        super()._forked(sid, child)
        self._twice = {*getattr(self, "_twice", ()), child}

    def _new_plan(self, *arguments):
        plan = super()._new_plan(*arguments)
        twice = getattr(self, "_twice", ())
        shift = torch.cat([torch.full((stop - start,), int(sid in twice)) for sid, start, stop in plan.spans])
        return replace(plan, positions=plan.positions - shift)


class PadsTakeTheLastRow(Paged):
    """Pads write through slot -1, which is the last row of the pool."""

    def _planned(self, spans, pad_to=None):
        plan = super()._planned(spans, pad_to)
        if plan.batch.pads:
            last = (self._lanes[0].pool.capacity + 1) * self.page_size - 1
            for slots in plan.private.slots:
                slots[-plan.batch.pads :] = last
        return plan


class PadsAreNotBilled(Contiguous):
    """The row that pads share is in nobody's bill."""

    def bytes_for(self, lengths, chunk=1):
        return super().bytes_for(lengths, chunk) - self._scratch * self._row_bytes


class LogitsOfTheLastRow(Paged):
    """Every sequence is sampled from the last row of the batch."""

    def _new_plan(self, *arguments):
        plan = super()._new_plan(*arguments)
        return replace(plan, logit_rows=plan.logit_rows[-1:].expand(len(plan.spans)))


class PromisesOneTooMany(Paged):
    """`rewind` says one token more than the slack keeps."""

    def __init__(self, *arguments, **parameters):
        super().__init__(*arguments, **parameters)
        self.rewind += 1


class RefusesOneTooEarly(Paged):
    """The deepest rewind that is promised is refused."""

    def _truncated(self, sid, length):
        if self.rewind != float("inf") and length <= self._histories[sid].high - self.slack:
            raise CannotRewind(f"sequence {sid} cannot go back to {length}")
        super()._truncated(sid, length)


class WritesOnce(Contiguous):
    """A row that was written before keeps its old bytes: a slot handed on shows its previous owner."""

    def attend(self, layer, q, k, v, plan):
        keys, values = self._stores[layer]
        before = [[part.clone() for part in (store.codes, store.scales) if part is not None] for store in (keys, values)]
        self._written = getattr(self, "_written", {})
        seen = self._written.setdefault((layer, id(keys)), set())
        again = [slot for slot in plan.private.slots.tolist() if slot in seen]
        seen.update(plan.private.slots.tolist())
        if not again:
            return super().attend(layer, q, k, v, plan)
        self.ops.write_rows(keys, plan.private.slots, k)
        self.ops.write_rows(values, plan.private.slots, v)
        for store, parts in zip((keys, values), before, strict=True):
            for part, old in zip((p for p in (store.codes, store.scales) if p is not None), parts, strict=True):
                part[again] = old[again]
        mask, geometry = self.mask(layer), self.geometry
        return self.ops.attend_dense(q, keys, values, plan.private.where, plan.batch, mask, geometry.scale, geometry.softcap)


class ReusesIds(Paged):
    """A new sequence gets the smallest id that is free."""

    def open(self, prompt=(), expect=None):
        self._sids = iter([next(n for n in range(10**6) if n not in self._histories)])
        return super().open(prompt, expect)

    def fork(self, sid):
        self._sids = iter([next(n for n in range(10**6) if n not in self._histories)])
        return super().fork(sid)


class TrustsTheHash(PrefixIndex):
    """Pages are found by a small hash of their tokens; the tokens are not compared."""

    def _slice(self, tokens, page):
        return (sum(super()._slice(tokens, page)) % 4,)


class ForgetsTheParent(PrefixIndex):
    """A page is found by its own tokens, whatever came before it."""

    def chain(self, tokens, most):
        nodes = []
        for page in range(most):
            found = next((node for (_, own), node in self._nodes.items() if own == self._slice(tokens, page)), None)
            if found is None:
                break
            nodes.append(found)
        return nodes


class PublishesWhatItPlans(Paged):
    """Pages of a prompt become findable when they are planned, before anything is written."""

    def _opened(self, sid, history, prompt, expect):
        super()._opened(sid, history, prompt, expect)
        self._prompts = {**getattr(self, "_prompts", {}), sid: list(prompt)}

    def _planned(self, spans):
        plan = super()._planned(spans)
        if all(len(self._prompts.get(sid, ())) >= stop for sid, _, stop in spans):
            before = {sid: list(self._tokens[sid]) for sid, _, _ in spans}
            super()._publish(plan, [token for sid, start, stop in spans for token in self._prompts[sid][start:stop]])
            self._tokens |= before
        return plan

    def _publish(self, plan, token_ids):
        if not all(len(self._chains[sid]) >= stop // self.page_size for sid, _, stop in plan.spans):
            super()._publish(plan, token_ids)
            return
        at = 0
        for sid, start, stop in plan.spans:
            self._tokens[sid].extend(token_ids[at : at + stop - start])
            at += stop - start


class StalePrefix(PagePool):
    """An evicted page stays in the prefix index."""

    def _evict(self):
        page, _ = self._cached.popitem(last=False)
        self._published.discard(page)
        return page


class WritesToPublishedPages(PagePool):
    """A published page that is written in place stays published."""

    def retract(self, page):
        pass


class NoCopyOnWrite(Lane):
    """A shared page is written in place."""

    def _shared_tails(self, spans):
        return []


class CopiesOnlyKeys(Paged):
    """Copy-on-write copies keys; values of the new page stay as they were."""

    def _planned(self, spans):
        right = self.ops
        self.ops = copy.copy(right)
        self.ops.copy_pages = lambda stores, sources, targets: right.copy_pages(stores[::2], sources, targets)
        try:
            return super()._planned(spans)
        finally:
            self.ops = right


class CopiesKeysIntoValues(Paged):
    """Copy-on-write fills both halves of the new page from the keys."""

    def _planned(self, spans):
        right = self.ops

        def copy_pages(stores, sources, targets):
            right.copy_pages(stores, sources, targets)
            for keys, values in zip(stores[::2], stores[1::2], strict=True):
                size = keys.page_size
                for target in targets.tolist():
                    values.codes[target * size : (target + 1) * size] = keys.codes[target * size : (target + 1) * size]

        self.ops = copy.copy(right)
        self.ops.copy_pages = copy_pages
        try:
            return super()._planned(spans)
        finally:
            self.ops = right


class CutsAPageTooMuch(Lane):
    """Truncating drops the page that the new end lies in, and the next token starts a new one in its place."""

    def truncate(self, sid, length):
        self.pool.release(reversed(self.tables.cut(sid, length // self._page_size)))
        if length % self._page_size:
            self.tables.append(sid, self.pool.take(1))


class UndoForgetsTheCopy(Lane):
    """Aborting gives new pages back, but the copy of a shared page stays in the table and the page itself loses an owner."""

    def undo(self, taken):
        for sid, before in taken.appended:
            self.pool.release(reversed(self.tables.cut(sid, before)))
        for sid, index, old in taken.copied:
            self.pool.release([old])
            assert self.tables.page(sid, index) != old


class TwinHistories(Paged):
    """A child and its parent share one record of their length."""

    def fork(self, sid):
        child = super().fork(sid)
        self._histories[child] = self._histories[sid]
        return child


class LeaksCutPages(Lane):
    """Truncating forgets pages without giving them back."""

    def truncate(self, sid, length):
        self.tables.cut(sid, -(-length // self._page_size))


class LeaksAbortedPages(Lane):
    """Aborting unmaps the new pages without giving them back."""

    def undo(self, taken):
        for sid, before in taken.appended:
            self.tables.cut(sid, before)
        for sid, index, old in taken.copied:
            self.pool.release([self.tables.page(sid, index)])
            self.tables.set(sid, index, old)


class RefusalCostsAPage(Paged):
    """A plan that does not fit has taken a page before it finds out."""

    def _planned(self, spans):
        try:
            return super()._planned(spans)
        except CacheFull:
            if self._lanes[0].pool.available:
                self._lanes[0].pool.take(1)
            raise


class ShortByNothing(Paged):
    """CacheFull does not say how much is missing."""

    def _planned(self, spans):
        try:
            return super()._planned(spans)
        except CacheFull as full:
            raise CacheFull(0, full.sids) from None


class FreesWithoutCounting(Contiguous):
    """Closing a fork frees rows that its parent still reads, and freeing twice is taken in silence."""

    def _give_back(self, run):
        if run is not None:
            try:
                self._arena.give(run.first, run.rows)
            except ValueError:
                return


class NeverMerges(Extents):
    """Free runs are not joined with their neighbours: what comes back in pieces is never whole again."""

    def give(self, first, rows):
        self._free = sorted([*self._free, (first, rows)])


class ChunkAges(Kivi):
    """What has aged is decided once for a chunk, by its last query: earlier ones read codes where rows are due."""

    def _one_span(self, layer, sid, q, start, stop, raw):
        last = super().aged(stop - 1)
        self._fixed = last
        try:
            return super()._one_span(layer, sid, q, start, stop, raw)
        finally:
            self._fixed = None

    def aged(self, position):
        fixed = getattr(self, "_fixed", None)
        return super().aged(position) if fixed is None else fixed


class OnlyClaimsInt8(Paged):
    """Says int8 and stores what it got."""

    def __init__(self, *arguments, codec_k, codec_v, **parameters):
        super().__init__(*arguments, **parameters)
        self.codec_k, self.codec_v = codec_named(codec_k), codec_named(codec_v)


class BillsTheFormula(Paged):
    """`reserved` is computed without the page that belongs to nobody, not read off the tensors."""

    def stats(self):
        stats = super().stats()
        return replace(stats, reserved_bytes=stats.reserved_bytes - sum(lane.page_bytes for lane in self._lanes))


class ForgetsScales(Paged):
    """Predictions leave out the bytes of the scales."""

    def bytes_for(self, lengths, chunk=1):
        whole = super().bytes_for(lengths, chunk)
        codec, dim = self.codec_k, self.geometry.layers[0].head_dim
        return whole * dim // (dim + codec.scales_per_row(dim) * codec.scale_bytes)


class WindowIsStillLive(Paged):
    """Every token counts as live, seen or not."""

    def stats(self):
        stats = super().stats()
        rows = sum(history.length for history in self._histories.values())
        live = rows * sum(lane.page_bytes // self.page_size for lane in self._lanes)
        return replace(stats, live_bytes=min(max(live, stats.live_bytes), stats.in_use_bytes))


class ForksAreBilledTwice(Contiguous):
    """Shared rows are in use once for each sequence that reads them."""

    def stats(self):
        stats = super().stats()
        rows = sum(run.rows for run in self._runs.values() if run is not None)
        return Stats(stats.reserved_bytes, min(stats.reserved_bytes, rows * self._row_bytes), stats.live_bytes, 0)


class RoundsDown(Paged):
    """Predictions forget the last, partial page."""

    def bytes_for(self, lengths, chunk=1):
        whole = [length - length % self.page_size for length in lengths]
        return super().bytes_for(whole, chunk)


KEPT: list[torch.Tensor] = []


class NeverLetsGo(Paged):
    """A registry keeps every buffer alive."""

    def attend(self, layer, q, k, v, plan):
        KEPT.extend(self.tensors()[:1])
        return super().attend(layer, q, k, v, plan)


class OverspendsByAPage(Paged):
    """The budget is checked before the page that belongs to nobody is added."""

    def __init__(self, geometry, budget_bytes, backend, **parameters):
        free = Paged(geometry, None, backend, **parameters)
        page = free.bytes_for([])
        super().__init__(geometry, None if budget_bytes is None else budget_bytes + page, backend, **parameters)
