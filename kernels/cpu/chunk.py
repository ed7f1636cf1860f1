"""Attention of a tile of query tokens over a run of keys, compiled: keys are unpacked once for a tile, then multiplied as matrices.

A task is one tile of one span and one KV head, or one split of its keys. It takes any head_dim and any mask.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.compiled import inline, kernel
from kernels.cpu.emit import BLOCK, FORMATS, LANES
from kernels.cpu.encode import copy_bytes
from kernels.cpu.micro import PANEL, TILE_ROWS, decode_row, matmul, transpose
from kernels.cpu.narrow import matmul_pairs
from kernels.cpu.scalars import copy_floats, decoded_value, float_word, load_f32, set_floats, store_f32, take, word
from kernels.cpu.shared import (
    CAPPED,
    COUNTERS,
    DIM,
    FIRST,
    HEAD,
    HIGH,
    KEYS,
    KV_HEADS,
    LOW,
    NEXT_TASK,
    NEXT_THREAD,
    PARTIAL_BYTES,
    PARTIALS,
    POSITION,
    Q_FORM,
    QUERY_HEADS,
    ROW,
    SCALE,
    SCRATCH,
    SCRATCH_BYTES,
    SINK_COUNT,
    SINKS,
    SOFTCAP,
    SPLIT,
    SPLITS,
    TABLE,
    TASK_WORDS,
    TASKS,
    TOKENS,
    UNIT,
    VALUES,
    WINDOW,
    cap_scores,
    copy_query,
    fill_slots,
    load_query,
    merge_rows,
    store_answer,
)
from kernels.cpu.softmax import CHUNK, exp_sum, scale_row, scaled_max

BFLOAT16 = FORMATS["bfloat16"]
TILE = 120  # query rows (tokens times shared heads) of one tile: their scores and sums stay in the second-level cache


def tile_tokens(query_heads: int, kv_heads: int) -> int:
    """Query tokens of one tile."""
    return max(1, TILE * kv_heads // query_heads)


def scratch_bytes(query_heads: int, kv_heads: int, dim: int) -> int:
    """Bytes that one thread works in."""
    rows, width = _sizes(query_heads, kv_heads, dim)
    return 8 * CHUNK + 4 * (rows * (2 * width + CHUNK + 2) + 2 * CHUNK * width)


def partial_bytes(query_heads: int, kv_heads: int, dim: int) -> int:
    """Bytes of one split's result."""
    rows, width = _sizes(query_heads, kv_heads, dim)
    return 4 * rows * (width + 2)


def _sizes(query_heads: int, kv_heads: int, dim: int) -> tuple[int, int]:
    rows = tile_tokens(query_heads, kv_heads) * (query_heads // kv_heads)
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-dim // PANEL) * PANEL


@inline
def _unpack(args, store, head, slots, count, width, out):
    """Rows of `count` slots as float32 [CHUNK, width], zeros behind them."""
    dim = word(args, DIM)
    codes = word(args, store) + head * word(args, store + 2)
    scales = word(args, store + 3) + head * word(args, store + 5)
    row_bytes, scale_bytes, form = word(args, store + 1), word(args, store + 4), word(args, store + 6)
    blocks = dim // BLOCK
    for r in range(count):
        slot = word(slots, r)
        code_at, scale_at, out_at = codes + slot * row_bytes, scales + slot * scale_bytes, out + 4 * width * r
        decode_row(form, code_at, scale_at, blocks, out_at)
        for i in range(blocks * BLOCK, dim):
            store_f32(out_at + 4 * i, decoded_value(form, code_at, scale_at, i))
        set_floats(out_at, dim, width, np.float32(0))
    set_floats(out, count * width, CHUNK * width, np.float32(0))


@inline
def _hide(args, task, low, count, position, scores):
    """-inf for the keys that the query at `position` may not see, and for those past `count`; whether there were any."""
    sinks, first, window = word(task, SINK_COUNT), word(task, FIRST), word(args, WINDOW)
    farthest, nearest = first + max(low, sinks) - sinks, first + low + count - 1 - sinks  # but for sinks, which all may see
    if count == CHUNK and nearest <= position and position - farthest < window:
        return False
    for i in range(count):
        index = low + i
        key = index if index < sinks else first + index - sinks
        if key > position or (position - key >= window and key >= word(args, SINKS)):
            store_f32(scores + 4 * i, np.float32(-np.inf))
    set_floats(scores, count, CHUNK, np.float32(-np.inf))
    return True


@inline
def _weigh(args, task, low, count, position, scores, top_at, total_at, sums, width):
    """Scores of one query to weights, in place; its maximum, total and sums are brought up to date."""
    top = scaled_max(scores, float_word(args, SCALE))
    capped = word(args, CAPPED) != 0
    if capped:
        cap_scores(scores, CHUNK, float_word(args, SOFTCAP))
    if _hide(args, task, low, count, position, scores) or capped:
        top = scaled_max(scores, np.float32(1))
    old = load_f32(top_at)
    if old > top:
        top = old
    if top == np.float32(-np.inf):
        set_floats(scores, 0, CHUNK, np.float32(0))
        return
    kept = np.float32(math.exp(old - top))
    store_f32(total_at, load_f32(total_at) * kept + exp_sum(scores, top))
    store_f32(top_at, top)
    if kept != np.float32(1):
        scale_row(sums, width, kept)


@inline
def _finish(args, task, state, rows, width):
    """Write the answers of a tile that had all keys, or merge its splits once the last of them is done."""
    shared, splits, unit = word(args, QUERY_HEADS) // word(args, KV_HEADS), word(task, SPLITS), word(task, UNIT)
    step = word(args, PARTIAL_BYTES)
    first = word(args, PARTIALS) + unit * step
    if splits > 1:
        copy_floats(state, first + word(task, SPLIT) * step, rows * (width + 2))
        if take(word(args, COUNTERS) + 8 * unit) != splits - 1:
            return
    for row in range(word(task, TOKENS) * shared):
        token, head = word(task, ROW) + row // shared, word(task, HEAD) * shared + row % shared
        if splits > 1:
            total = merge_rows(first, step, splits, row, rows, width)
            store_answer(args, token, head, first + 4 * (2 * rows + row * width), total)
        else:
            store_answer(args, token, head, state + 4 * (2 * rows + row * width), load_f32(state + 4 * (rows + row)))


@inline
def _pack(args, head, slots, count, out):
    """Keys of `count` slots as they are, bfloat16 [count, dim]."""
    size = 2 * word(args, DIM)
    codes = word(args, KEYS) + head * word(args, KEYS + 2)
    for r in range(count):
        copy_bytes(codes + word(slots, r) * word(args, KEYS + 1), out + size * r, size)


@inline
def _load_queries(args, task, head, used, rows, width, pairs, out):
    """The task's query rows: float32 [rows, width], or as they are, bfloat16 [rows, dim]; zeros behind the `used` ones."""
    shared, dim = word(args, QUERY_HEADS) // word(args, KV_HEADS), word(args, DIM)
    for row in range(used):
        token, query_head = word(task, ROW) + row // shared, head * shared + row % shared
        if pairs:
            copy_query(args, token, query_head, out + 2 * dim * row, 2 * dim)
        else:
            load_query(args, token, query_head, out + 4 * width * row, width)
    filled = dim // 2 if pairs else width  # floats of a row
    set_floats(out, used * filled, rows * filled, np.float32(0))


@inline
def _no_product(a, a_bytes, b, b_bytes, c, c_bytes, rows, columns, pairs):
    """Stands where a host without the instruction never comes."""


def make_chunk(narrow: bool):
    """The kernel for tiles. narrow: the host multiplies bfloat16 itself, and does so where queries and keys are bfloat16."""
    product = matmul_pairs if narrow else _no_product

    @kernel
    def tiles(args):
        dim = word(args, DIM)
        shared = word(args, QUERY_HEADS) // word(args, KV_HEADS)
        width = (dim + PANEL - 1) // PANEL * PANEL
        pairs = narrow and dim == width and word(args, Q_FORM) == BFLOAT16 and word(args, KEYS + 6) == BFLOAT16
        slots = word(args, SCRATCH) + take(args + 8 * NEXT_THREAD) * word(args, SCRATCH_BYTES)
        unpacked = slots + 8 * CHUNK
        turned = unpacked + 4 * CHUNK * width
        queries = turned + 4 * CHUNK * width
        while True:
            number = take(args + 8 * NEXT_TASK)
            if number >= word(args, TASKS):
                return
            task = word(args, TABLE) + 8 * TASK_WORDS * number
            head, used = word(task, HEAD), word(task, TOKENS) * shared
            rows = (used + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
            scores = queries + 4 * rows * width
            tops = scores + 4 * rows * CHUNK
            sums = tops + 8 * rows
            _load_queries(args, task, head, used, rows, width, pairs, queries)
            set_floats(tops, 0, rows, np.float32(-np.inf))
            set_floats(tops, rows, rows * (2 + width), np.float32(0))
            low = word(task, LOW)
            while low < word(task, HIGH):
                count = min(np.int64(CHUNK), word(task, HIGH) - low)
                fill_slots(args, task, low, count, count, slots)
                if pairs:
                    _pack(args, head, slots, count, unpacked)
                    for r in range(0, CHUNK, LANES):
                        for d in range(0, dim // 2, LANES):
                            transpose(unpacked + 4 * (r * (dim // 2) + d), 2 * dim, turned + 4 * (d * CHUNK + r), 4 * CHUNK)
                    product(queries, 2 * dim, turned, 4 * CHUNK, scores, 4 * CHUNK, rows, CHUNK, dim // 2)
                else:
                    _unpack(args, KEYS, head, slots, count, width, unpacked)
                    for r in range(0, CHUNK, LANES):
                        for d in range(0, width, LANES):
                            transpose(unpacked + 4 * (r * width + d), 4 * width, turned + 4 * (d * CHUNK + r), 4 * CHUNK)
                    matmul(queries, 4 * width, turned, 4 * CHUNK, scores, 4 * CHUNK, rows, CHUNK, width, 0)
                for row in range(used):
                    position = word(task, POSITION) + row // shared
                    _weigh(
                        args,
                        task,
                        low,
                        count,
                        position,
                        scores + 4 * CHUNK * row,
                        tops + 4 * row,
                        tops + 4 * (rows + row),
                        sums + 4 * width * row,
                        width,
                    )
                _unpack(args, VALUES, head, slots, count, width, unpacked)
                matmul(scores, 4 * CHUNK, unpacked, 4 * width, sums, 4 * width, rows, width, count, 1)
                low += count
            _finish(args, task, tops, rows, width)

    return tiles
