"""Softmax attention on a CPU: one sequence at a time, every KV head once for the query heads that share it.

A step that feeds one token of a sequence is two small matrix products over a view of its rows. Longer spans go in tiles of
queries, so that the score matrix stays in cache. It does not know about codecs beyond asking the reference to decode rows.
"""

from __future__ import annotations

import torch

from kernels.reference import compute_dtype, decode, visible
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

TILE_SCORES = 1 << 20  # scores in flight: 4 MiB in float32


def attend_dense(
    q: torch.Tensor, keys: RowStore, values: RowStore, where: DenseRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    def rows(store: RowStore, b: int, first: int, stop: int) -> torch.Tensor:
        base = where.host[b]
        return _decoded(store, slice(base + first, base + stop))

    return _attend(q, batch, mask, scale, softcap, lambda b, first, stop: (rows(keys, b, first, stop), rows(values, b, first, stop)))


def attend_paged(
    q: torch.Tensor, keys: RowStore, values: RowStore, where: PagedRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    size = where.page_size

    def gather(b: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        low = first // size
        pages = where.pages[b, low : -(-stop // size)]
        part = slice(first - low * size, stop - low * size)
        return _gathered(keys, pages, part), _gathered(values, pages, part)

    return _attend(q, batch, mask, scale, softcap, gather)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    dtype = compute_dtype(q.dtype)
    firsts = _first_rows(batch)

    def rows(b: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = slice(firsts[b] + first, firsts[b] + stop)
        return k[part].to(dtype), v[part].to(dtype)

    return _attend(q, batch, mask, scale, softcap, rows)


def _attend(q: torch.Tensor, batch: Batch, mask: Mask, scale: float, softcap: float | None, rows) -> torch.Tensor:
    """rows(b, first, stop) -> k, v [stop - first, Hkv, D] of span b in the compute dtype."""
    out = torch.empty_like(q)
    for b, (at, (start, stop)) in enumerate(zip(_first_rows(batch), batch.spans, strict=True)):
        first = mask.first_visible(start)
        k, v = rows(b, first, stop)
        sinks = min(mask.sinks, first)
        if sinks:
            sink_k, sink_v = rows(b, 0, sinks)
            k, v = torch.cat((sink_k, k)), torch.cat((sink_v, v))
        fed = slice(at, at + stop - start)
        out[fed] = _one_span(q[fed], k, v, start, first, sinks, mask, scale, softcap)
    return out


def _one_span(q, k, v, start: int, first: int, sinks: int, mask: Mask, scale: float, softcap: float | None) -> torch.Tensor:
    """q [t, Hq, D] at positions start.. over k, v [n, Hkv, D] at positions 0..sinks-1, first.. -> [t, Hq, D]."""
    tokens, query_heads, dim = q.shape
    kv_heads, count = k.shape[1], k.shape[0]
    group = query_heads // kv_heads
    keys, vals = k.permute(1, 2, 0), v.permute(1, 0, 2)  # [Hkv, D, n], [Hkv, n, D]
    wide = (q.to(k.dtype) * scale).view(tokens, kv_heads, group, dim)
    out = torch.empty_like(wide)
    tile = max(1, TILE_SCORES // (query_heads * count))
    for low in range(0, tokens, tile):
        part = wide[low : low + tile].permute(1, 0, 2, 3).reshape(kv_heads, -1, dim)  # [Hkv, t * group, D]
        seen = _seen(start + low, min(tile, tokens - low), first, sinks, count, mask)
        # Keys behind the last one that this tile may see are not worth multiplying.
        stop = count if seen is None else _last_seen(start + low, min(tile, tokens - low), first, sinks, count)
        scores = torch.bmm(part, keys[..., :stop])  # [Hkv, t * group, n]
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if seen is not None:
            scores.view(kv_heads, -1, group, stop).masked_fill_(~seen[:, None, :stop], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.bmm(weights, vals[:, :stop])  # [Hkv, t * group, D]
        out[low : low + tile] = mixed.view(kv_heads, -1, group, dim).permute(1, 0, 2, 3)
    return out.view(tokens, query_heads, dim).to(q.dtype)


def _last_seen(start: int, tokens: int, first: int, sinks: int, count: int) -> int:
    return min(count, sinks + start + tokens - first)


def _seen(start: int, tokens: int, first: int, sinks: int, count: int, mask: Mask) -> torch.Tensor | None:
    """[t, n] bool, or None for a single query: the rows handed over are exactly those that it sees."""
    if tokens == 1 and count == sinks + start + 1 - first and first == mask.first_visible(start):
        return None
    queries = torch.arange(start, start + tokens)
    positions = torch.cat((torch.arange(sinks), torch.arange(first, first + count - sinks)))
    return visible(queries, positions, mask)


def _decoded(store: RowStore, rows: slice) -> torch.Tensor:
    scales = None if store.scales is None else store.scales[rows]
    return decode(store.codec, store.codes[rows], scales, store.head_dim, compute_dtype(store.dtype))


def _gathered(store: RowStore, pages: torch.Tensor, part: slice) -> torch.Tensor:
    """Rows `part` of these pages laid end to end, decoded: [rows, Hkv, D]."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1, store.page_size, *tensor.shape[1:]).index_select(0, pages).flatten(0, 1)[part]

    scales = None if store.scales is None else rows(store.scales)
    return decode(store.codec, rows(store.codes), scales, store.head_dim, compute_dtype(store.dtype))


def _first_rows(batch: Batch) -> list[int]:
    """The first packed row of each span, on the host."""
    firsts, at = [], 0
    for start, stop in batch.spans:
        firsts.append(at)
        at += stop - start
    return firsts
