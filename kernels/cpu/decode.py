"""Attention of one query token over a run of keys, compiled: every KV head's row is read once for the query heads that share it.

A task is one span, or one split of its keys. `head_dim` must be a multiple of 32 here; `chunk.py` takes the others.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import inline, kernel
from kernels.cpu.emit import FORMATS
from kernels.cpu.scalars import copy_floats, float_word, load_f32, set_floats, take, word
from kernels.cpu.shared import (
    CAPPED,
    COUNTERS,
    DIM,
    HIGH,
    KEYS,
    KV_HEADS,
    LOW,
    NEXT_TASK,
    NEXT_THREAD,
    PARTIAL_BYTES,
    PARTIALS,
    Q_FORM,
    QUERY_HEADS,
    ROW,
    SCALE,
    SCRATCH,
    SCRATCH_BYTES,
    SOFTCAP,
    SPLIT,
    SPLITS,
    TABLE,
    TASK_WORDS,
    TASKS,
    UNIT,
    VALUES,
    cap_scores,
    copy_query,
    fill_slots,
    load_query,
    merge_rows,
    store_answer,
    store_words,
)
from kernels.cpu.softmax import CHUNK, scaled_max, weigh
from kernels.cpu.streams import HOST_IS_NARROW, NARROW, add_rows, dot_rows

BFLOAT16 = FORMATS["bfloat16"]
GROUPS = (1, 2, 3, 4)  # query heads that share one pass over a row


def group_of(query_heads: int, kv_heads: int) -> int:
    """Query heads a pass: all that share a KV head, or the size that wastes fewest passes and then fewest lanes."""
    shared = query_heads // kv_heads
    return min(GROUPS, key=lambda size: (-(-shared // size), size))


def scratch_bytes(query_heads: int, kv_heads: int, dim: int) -> int:
    """Bytes that one thread works in."""
    rows = _padded_rows(query_heads, kv_heads)
    return 2 * CHUNK * 8 + rows * 4 * (CHUNK + 2 * dim + 3)


def partial_bytes(query_heads: int, kv_heads: int, dim: int) -> int:
    """Bytes of one split's result."""
    return _padded_rows(query_heads, kv_heads) * 4 * (dim + 2)


def _padded_rows(query_heads: int, kv_heads: int) -> int:
    group = group_of(query_heads, kv_heads)
    return kv_heads * (-(-(query_heads // kv_heads) // group) * group)


@inline
def _finish(args, task, state, rows, padded):
    """Write the answer of a task that had all keys, or merge the splits once the last of them is done."""
    heads, kv_heads, dim, splits = word(args, QUERY_HEADS), word(args, KV_HEADS), word(args, DIM), word(task, SPLITS)
    shared = heads // kv_heads
    token, unit = word(task, ROW), word(task, UNIT)
    step = word(args, PARTIAL_BYTES)
    first = word(args, PARTIALS) + unit * step
    if splits > 1:
        copy_floats(state, first + word(task, SPLIT) * step, rows * (dim + 2))
        if take(word(args, COUNTERS) + 8 * unit) != splits - 1:
            return
    for head in range(heads):
        row = head // shared * padded + head % shared
        if splits > 1:
            total = merge_rows(first, step, splits, row, rows, dim)
            store_answer(args, token, head, first + 4 * (2 * rows + row * dim), total)
        else:
            store_answer(args, token, head, state + 4 * (2 * rows + row * dim), load_f32(state + 4 * (rows + row)))


@inline
def _load_queries(args, task, narrow, rows, padded, out):
    """The query heads of a task, those of a KV head in `padded` rows, zeros where there is none: as they are when narrow, else float32."""
    heads, dim = word(args, QUERY_HEADS), word(args, DIM)
    shared, size = heads // word(args, KV_HEADS), dim * (2 if narrow else 4)
    set_floats(out, 0, rows * dim, np.float32(0))
    for head in range(heads):
        target = out + size * (head // shared * padded + head % shared)
        if narrow:
            copy_query(args, word(task, ROW), head, target, size)
        else:
            load_query(args, word(task, ROW), head, target, dim)


def make_decode(group: int):
    """The kernel for `group` query heads a pass."""

    @kernel
    def decode(args):
        kv_heads, dim = word(args, KV_HEADS), word(args, DIM)
        parts = (word(args, QUERY_HEADS) // kv_heads + group - 1) // group
        padded = parts * group
        rows = kv_heads * padded
        slots = word(args, SCRATCH) + take(args + 8 * NEXT_THREAD) * word(args, SCRATCH_BYTES)
        ahead, scores = slots + 8 * CHUNK, slots + 16 * CHUNK
        kept = scores + 4 * rows * CHUNK
        queries = kept + 4 * rows
        tops = queries + 4 * rows * dim
        totals, sums = tops + 4 * rows, tops + 8 * rows
        k_codes, k_row, k_head, k_scales, k_scale_row, k_scale_head, k_form = store_words(args, KEYS)
        v_codes, v_row, v_head, v_scales, v_scale_row, v_scale_head, v_form = store_words(args, VALUES)
        scale, cap, capped = float_word(args, SCALE), float_word(args, SOFTCAP), word(args, CAPPED) != 0
        factor = np.float32(1) if capped else scale
        narrow = HOST_IS_NARROW and word(args, Q_FORM) == BFLOAT16
        if narrow:
            k_form += NARROW
        while True:
            number = take(args + 8 * NEXT_TASK)
            if number >= word(args, TASKS):
                return
            task = word(args, TABLE) + 8 * TASK_WORDS * number
            _load_queries(args, task, narrow, rows, padded, queries)
            set_floats(tops, 0, rows, np.float32(-np.inf))
            set_floats(totals, 0, rows * (dim + 1), np.float32(0))
            low, high = word(task, LOW), word(task, HIGH)
            count = min(np.int64(CHUNK), high - low)
            fill_slots(args, task, low, count, np.int64(CHUNK), slots)
            while low < high:
                after, following = min(np.int64(CHUNK), high - low - count), slots
                if after > 0:
                    fill_slots(args, task, low + count, after, np.int64(CHUNK), ahead)
                    following = ahead
                dot_rows(
                    group, k_form, queries, dim, kv_heads, parts, k_codes, k_row, k_head, k_scales, k_scale_row, k_scale_head, slots,
                    (count + 3) // 4 * 4, scores, following, k_head, v_codes, v_row, v_head,
                )  # fmt: skip
                for row in range(rows):
                    at = scores + 4 * CHUNK * row
                    set_floats(at, count, CHUNK, np.float32(-np.inf))
                    if capped:
                        scaled_max(at, scale)
                        cap_scores(at, count, cap)
                for row in range(0, rows, group):  # all rows before any sums: one row's softmax is a chain that waits for itself
                    weigh(group, scores + 4 * CHUNK * row, factor, tops + 4 * row, totals + 4 * row, kept + 4 * row)
                for row in range(0, rows, group):
                    head = row // padded
                    add_rows(
                        group, v_form, scores + 4 * CHUNK * row, count, v_codes + head * v_head, v_row, v_scales + head * v_scale_head,
                        v_scale_row, slots, dim, sums + 4 * dim * row, kept + 4 * row,
                    )  # fmt: skip
                low += count
                count = after
                slots, ahead = ahead, slots
            _finish(args, task, tops, rows, padded)

    return decode
