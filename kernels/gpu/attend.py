"""Softmax attention over stored rows: one kernel for dense and paged stores, whole or split over keys, and the merge of the splits.

A program serves one tile of queries of one span and one KV head: the query heads that share the KV head are packed into the
tile's rows, so that a single decode query still fills a matrix instruction. It does not know what the rows stand for.
"""

import triton
import triton.language as tl

from kernels.gpu.tiles import (
    LOG2E,
    as_operand,
    dot,
    load_codes,
    load_operand,
    load_row_scales,
    narrow,
    seen_by,
    softmax_step,
    tanh,
    widen,
)


@triton.jit
def find_span(tile, cu_seqlens, spans, tile_queries):
    """The span that query tile `tile` belongs to: span b owns tiles from cu_seqlens[b] // tile_queries + b on."""
    low = 0
    high = spans
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(cu_seqlens + middle) // tile_queries + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def store_rows(position, origin, live, page_size, PAGED: tl.constexpr):
    """Row of the store [N] int64 that holds each position: `origin` is the span's first page entry, or the row of position 0."""
    if PAGED:
        page = tl.load(origin + position // page_size, mask=live, other=0)
        return page.to(tl.int64) * page_size + position % page_size
    else:  # noqa: RET505 (the compiler reads on after a return that a constant decides, and there `origin` would be an address)
        return origin + position


@triton.jit(
    do_not_specialize=["spans", "q_pitch", "k_pitch", "v_pitch", "group", "tile_queries", "table_width", "page_size", "window", "sinks"]
)
def attend_kernel(
    q,  # [T, q_pitch, D]; the query heads are the first of each token's q_pitch heads
    k_codes,  # [rows, k_pitch, codes of one head]
    k_scales,  # [rows, k_pitch, scales of one head] or None
    v_codes,
    v_scales,
    out,  # [T, Hq, D], written when one program holds all keys of a tile
    parts,  # [T, Hq, splits, D] in the wide dtype, written when `splits` programs share them
    lse,  # [T, Hq, splits], with parts: base-2 logarithm of each split's sum of exponentials
    where,  # PAGED: [B, table_width] pages; else [B] the row of each span's position 0
    cu_seqlens,  # [B+1] int32
    starts,  # [B] int32
    spans,
    q_pitch,
    k_pitch,
    v_pitch,
    group,  # query heads that share a KV head
    tile_queries,  # queries in one tile: BLOCK_M // group
    table_width,
    page_size,
    scale,
    softcap,
    window,
    sinks,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CODEC_K: tl.constexpr,
    CODEC_V: tl.constexpr,
    PAGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    DTYPE: tl.constexpr = q.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if DTYPE.is_fp64() else tl.float32
    tile = tl.program_id(0)
    head = tl.program_id(1)
    span = find_span(tile, cu_seqlens, spans, tile_queries)
    packed = tl.load(cu_seqlens + span)
    count = tl.load(cu_seqlens + span + 1) - packed
    skipped = (tile - packed // tile_queries - span) * tile_queries  # queries of the span that earlier tiles serve
    if skipped >= count:
        return

    row = tl.arange(0, BLOCK_M)
    query = skipped + row // group  # [BLOCK_M] which query of the span
    owned = (row < tile_queries * group) & (query < count)
    lane = tl.arange(0, BLOCK_D)
    kept = owned[:, None] & (lane < D)[None, :]
    token = (packed + query).to(tl.int64)
    q_head = head * group + row % group
    q_tile = widen(tl.load(q + (token * q_pitch + q_head)[:, None] * D + lane[None, :], mask=kept, other=0.0))
    q_tile = as_operand(q_tile, DTYPE)  # [BLOCK_M, BLOCK_D]

    start = tl.load(starts + span)
    first_query = start + skipped
    last_query = start + tl.minimum(skipped + tile_queries, count) - 1
    end_tile = last_query // BLOCK_N + 1
    first_key = 0
    first_tile = 0
    sink_tiles = 0
    if WINDOWED:
        first_key = tl.maximum(first_query - window + 1, 0)
        first_tile = first_key // BLOCK_N
        sink_tiles = tl.minimum((sinks + BLOCK_N - 1) // BLOCK_N, first_tile)
    splits = tl.num_programs(2)
    steps = sink_tiles + end_tile - first_tile
    share = (steps + splits - 1) // splits
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, steps)

    if PAGED:
        origin = where + span.to(tl.int64) * table_width
    else:
        origin = tl.load(where + span).to(tl.int64)
    top = tl.full([BLOCK_M], float("-inf"), WIDE)
    total = tl.zeros([BLOCK_M], WIDE)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], WIDE)
    for step in range(begin, end):
        key_tile = tl.where(step < sink_tiles, step, first_tile + step - sink_tiles)
        key = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N] positions
        live = key <= last_query
        if WINDOWED:
            live = live & ((key >= first_key) | (key < sinks))
        stored = store_rows(key, origin, live, page_size, PAGED)
        k_rows = stored * k_pitch + head
        v_rows = stored * v_pitch + head

        if CODEC_K == "int8":  # codes are exact in every dtype, so the row's scale can wait for the score
            keys = load_codes(k_codes, k_rows, live, D, BLOCK_D).to(tl.float32).to(WIDE)
            scores = dot(q_tile, tl.trans(as_operand(keys, DTYPE)), tl.zeros([BLOCK_M, BLOCK_N], WIDE))
            scores = scores * load_row_scales(k_scales, k_rows, live).to(WIDE)[None, :]
        else:
            keys = load_operand(k_codes, k_scales, k_rows, live, CODEC_K, D, BLOCK_D, DTYPE, WIDE)
            scores = dot(q_tile, tl.trans(keys), tl.zeros([BLOCK_M, BLOCK_N], WIDE))
        scores = scores * scale
        if SOFTCAPPED:
            scores = softcap * tanh(scores / softcap)
        seen = seen_by(start + query, key, window, sinks, WINDOWED)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))

        weights, rescale, top, total = softmax_step(scores, top, total)
        values = load_operand(v_codes, v_scales, v_rows, live, CODEC_V, D, BLOCK_D, DTYPE, WIDE)
        mixed = dot(as_operand(weights, DTYPE), values, mixed * rescale[:, None])

    mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
    out_row = token * (tl.num_programs(1) * group) + q_head
    if splits == 1:
        tl.store(out + out_row[:, None] * D + lane[None, :], narrow(mixed, DTYPE), mask=kept)
    else:
        part = out_row * splits + tl.program_id(2)
        tl.store(parts + part[:, None] * D + lane[None, :], mixed, mask=kept)
        tl.store(lse + part, tl.where(total == 0, float("-inf"), top + tl.log2(tl.where(total == 0, 1.0, total))), mask=owned)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_kernel(
    parts,  # [rows, splits, D], a row being one query head of one token
    lse,  # [rows, splits]
    out,  # [rows, D]
    rows,
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    WIDE: tl.constexpr = parts.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_R], float("-inf"), WIDE)
    total = tl.zeros([BLOCK_R], WIDE)
    mixed = tl.zeros([BLOCK_R, BLOCK_D], WIDE)
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        live = (row < rows)[:, None] & (split < splits)[None, :]
        part = row[:, None] * splits + split[None, :]  # [BLOCK_R, BLOCK_S]
        scores = tl.load(lse + part, mask=live, other=float("-inf"))
        weights, rescale, top, total = softmax_step(scores, top, total)  # a split that saw no key has lse -inf: it weighs nothing
        kept = live[:, :, None] & (lane < D)[None, None, :]
        means = tl.load(parts + part[:, :, None] * D + lane[None, None, :], mask=kept, other=0.0)
        mixed = mixed * rescale[:, None] + tl.sum(weights[:, :, None] * means, axis=1)
    mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
    target = out + row[:, None] * D + lane[None, :]
    tl.store(target, narrow(mixed, out.dtype.element_ty), mask=(row < rows)[:, None] & (lane < D)[None, :])
