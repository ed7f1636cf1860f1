"""Planted faults in the kernels: what a slip in an attention or write kernel looks like, on top of the plain reference.

A fault replaces one function of the ops it is given; the poison and the write guard of the kit stay around it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from kernels import reference
from kernels.api import Ops
from kernels.codec import codec_named
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

NAMES = ("new_rows", "read_rows", "write_rows", "copy_pages", "move_rows", "attend_dense", "attend_paged", "attend_packed")


@dataclass(frozen=True)
class Span:
    """One span of an attend: q [t, Hq, D], decoded k and v [n, Hkv, D], their positions, and where it stands in the batch."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    mask: Mask
    scale: float
    softcap: float | None
    number: int
    batch: int  # spans of the step
    rows: int  # of the store; 0 when nothing is stored
    pages: tuple[int, ...]  # page ids of this span's table, in logical order

    @property
    def start(self) -> int:
        return int(self.queries[0])

    @property
    def tokens(self) -> int:
        return len(self.queries)

    def right(self) -> torch.Tensor:
        """What the reference answers."""
        return reference.attend_one(self.q, self.k, self.v, self.queries, self.keys, self.mask, self.scale, self.softcap)

    def masked(self, mask: Mask) -> torch.Tensor:
        """The answer under another mask; rows that the right mask hides are not there, so a wider one sees only what was read."""
        return replace(self, mask=mask).right()

    def hiding(self, hidden: torch.Tensor) -> torch.Tensor:
        """The answer without these keys: hidden [t, n] bool."""
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("thd,nhd->htn", self.q.to(k.dtype), k) * self.scale
        seen = reference.visible(self.queries, self.keys, self.mask) & ~hidden
        return torch.einsum("htn,nhd->thd", torch.softmax(scores.masked_fill(~seen, float("-inf")), -1), v).to(self.q.dtype)


Attend = Callable[[Span], torch.Tensor]


def with_functions(ops: Ops, **functions: Callable[..., object]) -> Ops:
    """The same ops with some functions replaced by faulty ones."""
    faulty = copy.copy(ops)
    faulty._module = SimpleNamespace(**{name: getattr(ops._module, name) for name in NAMES} | functions)
    return faulty


def with_attend(ops: Ops, attend: Attend) -> Ops:
    """The same ops, each span of each attend answered by `attend`."""

    def stored(q, keys, values, slots_of, tables, batch, mask, scale, softcap):
        out = torch.empty_like(q)
        for number, (start, stop) in enumerate(batch.spans):
            rows = slice(int(batch.cu_seqlens[number]), int(batch.cu_seqlens[number + 1]))
            positions = reference._reachable(start, stop, mask, q.device)
            slots = slots_of(number, positions)
            k, v = (reference._decoded(store, slots) for store in (keys, values))
            queries = torch.arange(start, stop)
            count = len(batch.spans)
            out[rows] = attend(Span(q[rows], k, v, queries, positions, mask, scale, softcap, number, count, keys.count, tables(number)))
        return out

    def paged(q, keys, values, where: PagedRows, batch: Batch, mask, scale, softcap):
        size = where.page_size
        slots = lambda b, at: where.pages[b].long()[at // size] * size + at % size  # noqa: E731
        return stored(q, keys, values, slots, lambda b: tuple(where.pages[b].tolist()), batch, mask, scale, softcap)

    def dense(q, keys, values, where: DenseRows, batch: Batch, mask, scale, softcap):
        return stored(q, keys, values, lambda b, at: where.bases[b] + at, lambda b: (), batch, mask, scale, softcap)

    return with_functions(ops, attend_paged=paged, attend_dense=dense)


def with_encode(ops: Ops, encode: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]) -> Ops:
    """The same ops, rows of codecs other than raw encoded by `encode(codec, rows)`."""

    def write_rows(store: RowStore, slots: torch.Tensor, rows: torch.Tensor) -> None:
        codes, scales = (reference.encode if store.codec.name == "raw" else encode)(store.codec, rows)
        store.codes[slots] = codes
        if scales is not None:
            store.scales[slots] = scales

    return with_functions(ops, write_rows=write_rows)


def decode_window_is_one_short(span: Span) -> torch.Tensor:
    """The stored number was a radius and decode used it as a count; only deep in a text, where a window ends inside a page."""
    late = span.tokens == 1 and span.mask.window is not None and span.start > 2 * span.mask.window
    return span.masked(replace(span.mask, window=max(1, span.mask.window - 1))) if late else span.right()


def later_chunks_share_one_mask(span: Span) -> torch.Tensor:
    """The mask over what was stored is built once per chunk, for its first query: later rows see more than they may."""
    if span.mask.window is None or span.start == 0 or span.tokens == 1:
        return span.right()
    return span.masked(replace(span.mask, window=span.mask.window + span.tokens - 1))


def chunk_larger_than_the_window_overruns(span: Span) -> torch.Tensor:
    """A chunk is written into a ring of twice the window before its first queries read the tail of the previous chunk."""
    if span.mask.window is None or span.start == 0 or span.tokens <= span.mask.window:
        return span.right()
    last = span.start + span.tokens - 1
    hidden = (span.keys <= last - 2 * span.mask.window) & (span.keys >= span.mask.sinks) & (span.keys < span.start)
    return span.hiding(hidden[None, :].expand(span.tokens, -1))


def last_page_is_cut_short_in_a_batch(span: Span) -> torch.Tensor:
    """A table length rounded down: with mates, a query that starts a page does not see the last token of the page before."""
    if span.batch == 1 or span.start == 0 or span.start % 4 != 0:
        return span.right()
    hidden = (span.keys == span.start - 1) & (span.queries[:, None] > span.start - 1)
    return span.hiding(hidden)


def sinks_are_forgotten_by_chunks(span: Span) -> torch.Tensor:
    """Later chunks of a prefill go through a kernel that was never given the sinks."""
    if span.start == 0 or span.tokens == 1 or span.mask.sinks == 0:
        return span.right()
    return span.masked(replace(span.mask, sinks=0))


def heads_divide_by_kv_heads(span: Span) -> torch.Tensor:
    """Query head h reads KV head h // Hkv: right by luck for 9/3, 4/2 and 64/8."""
    kv_heads = span.k.shape[1]
    wrong = torch.arange(span.q.shape[1]) // kv_heads % kv_heads
    return replace(span, k=span.k[:, wrong], v=span.v[:, wrong]).right()


def only_64_lanes_are_scored(span: Span) -> torch.Tensor:
    """A constant left in: scores use the first 64 channels."""
    return replace(span, q=span.q[..., :64], k=span.k[..., :64]).right() if span.q.shape[-1] > 64 else span.right()


def query_is_scaled_in_place(span: Span) -> torch.Tensor:
    """The scale is multiplied into the caller's own tensor."""
    span.q.mul_(span.scale)
    return replace(span, scale=1.0).right()


def batches_read_the_first_table(span_of_batch: Ops) -> Ops:
    """A batch stride left at 0: spans that are as long as the first read its table."""
    right = span_of_batch._module.attend_paged

    def paged(q, keys, values, where: PagedRows, batch: Batch, mask, scale, softcap):
        pages = where.pages.clone()
        for number, span in enumerate(batch.spans):
            if span == batch.spans[0] and span[1] - span[0] == 1:
                pages[number] = pages[0]
        return right(q, keys, values, PagedRows(pages, where.page_size), batch, mask, scale, softcap)

    return with_functions(span_of_batch, attend_paged=paged)


def small_integers_hold_the_slots(ops: Ops) -> Ops:
    """Offsets are computed in an integer that is too narrow: rows from 96 on wrap to the start of the pool."""
    write, paged = ops._module.write_rows, ops._module.attend_paged

    def write_rows(store: RowStore, slots: torch.Tensor, rows: torch.Tensor) -> None:
        write(store, slots % 96, rows)

    def attend_paged(q, keys, values, where: PagedRows, batch: Batch, mask, scale, softcap):
        return paged(q, keys, values, PagedRows(where.pages % (96 // where.page_size), where.page_size), batch, mask, scale, softcap)

    return with_functions(ops, write_rows=write_rows, attend_paged=attend_paged)


def strides_are_taken_for_granted(ops: Ops) -> Ops:
    """Rows are read from memory as if they lay one after another, whatever their strides."""
    write = ops._module.write_rows

    def write_rows(store: RowStore, slots: torch.Tensor, rows: torch.Tensor) -> None:
        flat = rows.as_strided(rows.shape, (rows.shape[1] * rows.shape[2], rows.shape[2], 1), rows.storage_offset())
        write(store, slots, flat)

    return with_functions(ops, write_rows=write_rows)


def tail_of_the_last_page_is_multiplied(ops: Ops) -> Ops:
    """Scores past the end are masked, values are not: zero times what the memory held."""

    def attend(span: Span) -> torch.Tensor:
        return span.right() + 0 * span.v.sum()

    def paged(q, keys, values, where: PagedRows, batch: Batch, mask, scale, softcap):
        out = with_attend(ops, Span.right)._module.attend_paged(q, keys, values, where, batch, mask, scale, softcap)
        size = where.page_size
        for number, (_, stop) in enumerate(batch.spans):
            rows = slice(int(batch.cu_seqlens[number]), int(batch.cu_seqlens[number + 1]))
            tail = torch.arange(stop, -(-stop // size) * size)
            slots = where.pages[number].long()[tail // size] * size + tail % size
            out[rows] += 0 * reference._decoded(values, slots).to(out.dtype).sum(0).repeat_interleave(q.shape[1] // values.heads, dim=0)
        return out

    def new_rows(*arguments: object) -> RowStore:
        store = reference.new_rows(*arguments)
        for part in (store.codes, store.scales):
            if part is not None:
                part.zero_()
        return store

    return with_functions(ops, attend_paged=paged, new_rows=new_rows)


def softmax_does_not_shift(span: Span) -> torch.Tensor:
    """exp of the scores as they are: overflows where they are large."""
    group = span.q.shape[1] // span.k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (span.k, span.v))
    scores = torch.einsum("thd,nhd->htn", span.q.to(k.dtype), k) * span.scale
    if span.softcap is not None:
        scores = span.softcap * torch.tanh(scores / span.softcap)
    weights = torch.exp(scores) * reference.visible(span.queries, span.keys, span.mask)
    return torch.einsum("htn,nhd->thd", weights / weights.sum(-1, keepdim=True), v).to(span.q.dtype)


def scores_are_kept_in_float16(span: Span) -> torch.Tensor:
    """The raw product is stored in half precision before it is scaled, for half-precision models only."""
    if span.q.dtype != torch.float16:
        return span.right()
    group = span.q.shape[1] // span.k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (span.k, span.v))
    scores = torch.einsum("thd,nhd->htn", span.q.float(), k.float()).half().float() * span.scale
    seen = reference.visible(span.queries, span.keys, span.mask)
    return torch.einsum("htn,nhd->thd", torch.softmax(scores.masked_fill(~seen, float("-inf")), -1), v.float()).half()


def empty_tile_has_no_guard(span: Span) -> torch.Tensor:
    """Online softmax over tiles of 16 keys: exp(-inf - -inf) for a row whose first tile lies wholly outside its window."""
    out = span.right()
    if span.mask.window is not None and span.tokens > 1:
        first_tile = span.keys[0] + 16
        seen = reference.visible(span.queries, span.keys[span.keys < first_tile], span.mask).any(1)
        out[~seen] = float("nan")
    return out


def softcap_is_not_passed_on(span: Span) -> torch.Tensor:
    """A code path for decode was never given the softcap."""
    return replace(span, softcap=None).right() if span.tokens == 1 else span.right()


def mates_lower_the_precision(span: Span) -> torch.Tensor:
    """Batches take a path that computes in single precision."""
    if span.batch == 1:
        return span.right()
    return replace(span, q=span.q.float(), k=span.k.float(), v=span.v.float()).right().to(span.q.dtype)


def physical_order_is_walked(span: Span) -> torch.Tensor:
    """Pages are visited in the order of their ids, so sums depend on where a sequence lies."""
    if not span.pages or span.batch > 1:
        return span.right()
    ids = torch.tensor(span.pages)[span.keys // 4] * 4 + span.keys % 4
    order = torch.argsort(ids)
    return replace(span, k=span.k[order], v=span.v[order], keys=span.keys[order]).right()


def pool_size_picks_the_splits(span: Span) -> torch.Tensor:
    """How many parts share the keys follows from the size of the pool, not from the sequence."""
    if span.rows <= 64 or span.tokens > 1:
        return span.right()
    order = torch.cat((torch.arange(0, len(span.keys), 2), torch.arange(1, len(span.keys), 2)))
    return replace(span, k=span.k[order], v=span.v[order], keys=span.keys[order]).right()


def second_call_forgets_the_newest_key(span: Span) -> torch.Tensor:
    """The first call is exact; a later call of more than one token does not find the last token of the call before."""
    if span.start == 0 or span.tokens == 1:
        return span.right()
    return span.hiding((span.keys == span.start - 1)[None, :].expand(span.tokens, -1))


def bfloat16_accumulates_in_bfloat16(span: Span) -> torch.Tensor:
    """Scores of a bfloat16 model are rounded to bfloat16."""
    if span.q.dtype != torch.bfloat16:
        return span.right()
    group = span.q.shape[1] // span.k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (span.k, span.v))
    scores = (torch.einsum("thd,nhd->htn", span.q.float(), k) * span.scale).bfloat16().float()
    seen = reference.visible(span.queries, span.keys, span.mask)
    return torch.einsum("htn,nhd->thd", torch.softmax(scores.masked_fill(~seen, float("-inf")), -1), v).bfloat16()


def scale_is_shared_by_heads(codec, rows: torch.Tensor):
    """One scale for all heads of a token."""
    widest = rows.abs().amax((-1, -2), keepdim=True).expand_as(rows[..., :1])
    _, scales = reference.encode(codec, widest.expand_as(rows).contiguous())
    step = scales.to(reference.compute_dtype(rows.dtype))
    return torch.round(rows / torch.where(step == 0, 1.0, step)).clamp(-127, 127).to(torch.int8), scales


def scale_is_shared_by_a_call(codec, rows: torch.Tensor):
    """One scale for all tokens that happen to be fed together."""
    widest = rows.abs().amax((0, -1), keepdim=True).expand(rows.shape)
    _, scales = reference.encode(codec, widest.contiguous())
    step = scales.to(reference.compute_dtype(rows.dtype))
    return torch.round(rows / torch.where(step == 0, 1.0, step)).clamp(-127, 127).to(torch.int8), scales


def codes_are_truncated(codec, rows: torch.Tensor):
    """Codes rounded towards zero instead of to the nearest."""
    _, scales = reference.encode(codec, rows)
    step = scales.to(reference.compute_dtype(rows.dtype))
    return torch.where(step == 0, 0.0, torch.trunc(rows / torch.where(step == 0, 1.0, step))).clamp(-127, 127).to(torch.int8), scales


def zero_rows_divide_by_zero(codec, rows: torch.Tensor):
    """No guard on the divisor: an all-zero row is 0 / 0, and the codes of NaN are whatever the cast makes of it."""
    codes, scales = reference.encode(codec, rows)
    zero = (rows == 0).all(-1, keepdim=True)
    return codes, torch.where(zero, float("nan"), scales.to(torch.float64)).to(scales.dtype)


def short_group_borrows_a_scale(codec, rows: torch.Tensor):
    """The last, short group of a row is coded with the scale of the group before it."""
    codes, scales = reference.encode(codec, rows)
    if rows.shape[-1] > 32 and rows.shape[-1] % 32:
        scales = scales.clone()
        scales[..., -1] = scales[..., -2]
    return codes, scales


def padding_lanes_join_the_range(codec, rows: torch.Tensor):
    """Dead lanes of the last group hold the row's first value times eight and stretch its range."""
    short = -rows.shape[-1] % 32
    if not short:
        return reference.encode(codec, rows)
    padded = torch.cat((rows, (rows[..., :1] * 8).expand(*rows.shape[:-1], short)), dim=-1)
    codes, scales = reference.encode(codec_named("q8_0"), padded)
    return codes[..., : rows.shape[-1]], scales
