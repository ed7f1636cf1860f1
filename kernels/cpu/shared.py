"""What both compiled attention kernels do around their inner loops: slots of keys, queries in, answers out, merging of splits.

The words of a call (`Word`) and of a task (`Task`) are int64; addresses and strides are in bytes. It does not know which
sequence a span belongs to.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.compiled import inline
from kernels.cpu.encode import copy_bytes
from kernels.cpu.scalars import lane, load_f32, load_i32, load_raw, store_f32, store_i64, store_raw, word

# Words of an attention call.
NEXT_TASK, NEXT_THREAD, TASKS, SCRATCH, SCRATCH_BYTES, TABLE = 0, 1, 2, 3, 4, 5
Q, Q_TOKEN, Q_HEAD, Q_FORM, OUT, OUT_HEAD = 6, 7, 8, 9, 10, 39
QUERY_HEADS, KV_HEADS, DIM = 11, 12, 13
KEYS, VALUES = 14, 21  # seven words each: codes, bytes a row, bytes a head, then the same for scales, then the format
WHERE, TABLE_WIDTH, PAGE_SIZE = 28, 29, 30  # no pages: page size 0, and WHERE holds each span's first row
PARTIALS, PARTIAL_BYTES, COUNTERS, SCALE, CAPPED, SOFTCAP, WINDOW, SINKS = 31, 32, 33, 34, 35, 36, 37, 38
COUNT, FAULTS = 40, 41  # rows of the store; set to one when a slot is not among them

# Words of a task: queries row..row+tokens-1 of span `span`, the first at `position`, over keys low..high-1 of the list that begins
# with `sinks` sinks and goes on from position `first`. `unit` numbers the tasks whose `splits` parts are merged.
SPAN, ROW, TOKENS, POSITION, HEAD, SINK_COUNT, FIRST, LOW, HIGH, SPLIT, SPLITS, UNIT = range(12)
TASK_WORDS = 12


@inline
def store_words(args, first):
    """The seven words of one store: codes, bytes a row, bytes a head; the same for scales; the format."""
    return (
        word(args, first),
        word(args, first + 1),
        word(args, first + 2),
        word(args, first + 3),
        word(args, first + 4),
        word(args, first + 5),
        word(args, first + 6),
    )


@inline
def fill_slots(args, task, low, count, padded, out):
    """The slots of keys low..low+count-1 of the task's list, then the last one again up to `padded` of them."""
    where, size = word(args, WHERE), word(args, PAGE_SIZE)
    span, sinks, first = word(task, SPAN), word(task, SINK_COUNT), word(task, FIRST)
    row_at = where + 4 * span * word(args, TABLE_WIDTH)
    base = word(where, span) if size == 0 else np.int64(0)
    done = np.int64(0)
    slot = np.int64(0)
    while done < count:
        index = low + done
        run = count - done
        position = first + index - sinks
        if index < sinks:
            position = index
            run = min(run, sinks - index)
        slot = base + position
        if size > 0:
            page = position // size
            within = position - page * size
            run = min(run, size - within)
            slot = load_i32(row_at + 4 * page) * size + within
        if slot < 0 or slot + run > word(args, COUNT):
            store_i64(args + 8 * FAULTS, np.int64(1))
            slot, run = np.int64(0), np.int64(1)
        for i in range(run):
            store_i64(out + 8 * (done + i), slot + i)
        slot += run - 1
        done += run
    for i in range(count, padded):
        store_i64(out + 8 * i, slot)


@inline
def _query(args, token, head):
    return word(args, Q) + token * word(args, Q_TOKEN) + head * word(args, Q_HEAD)


@inline
def copy_query(args, token, head, out, size):
    """One query head as it is, `size` bytes, to `out`."""
    copy_bytes(_query(args, token, head), out, size)


@inline
def load_query(args, token, head, out, width):
    """One query head as float32 at `out`, in the order of the keys' blocks, zeros up to `width`."""
    dim, form, key_form = word(args, DIM), word(args, Q_FORM), word(args, KEYS + 6)
    source = _query(args, token, head)
    for i in range(dim):
        store_f32(out + 4 * lane(i, dim, key_form), load_raw(form, source, i))
    for i in range(dim, width):
        store_f32(out + 4 * i, np.float32(0))


@inline
def store_answer(args, token, head, sums, total):
    """Weighted sums at `sums` over their total weight, as one row of the answer."""
    dim, form, value_form = word(args, DIM), word(args, Q_FORM), word(args, VALUES + 6)
    target = word(args, OUT) + (token * word(args, QUERY_HEADS) + head) * word(args, OUT_HEAD)
    for i in range(dim):
        store_raw(form, target, i, load_f32(sums + 4 * lane(i, dim, value_form)) / total)


@inline
def cap_scores(scores, count, cap):
    """cap * tanh(score / cap) in place."""
    for i in range(count):
        where = scores + 4 * i
        store_f32(where, cap * np.float32(math.tanh(load_f32(where) / cap)))


@inline
def merge_rows(first, step, splits, row, rows, width):
    """Merge row `row` of `splits` partial results in place, into the first; returns its total weight.

    A partial is `rows` maxima, `rows` total weights, then rows of `width` sums. Log-sum-exp merge: the order is fixed.
    """
    top = load_f32(first + 4 * row)
    for s in range(1, splits):
        other = load_f32(first + s * step + 4 * row)
        if not other < top:
            top = other
    total = np.float32(0)
    sums = first + 4 * (2 * rows + row * width)
    for s in range(splits):
        part = first + s * step
        weight = np.float32(math.exp(load_f32(part + 4 * row) - top))
        total += weight * load_f32(part + 4 * (rows + row))
        source = part + 4 * (2 * rows + row * width)
        for i in range(width):
            value = weight * load_f32(source + 4 * i)
            if s > 0:
                value += load_f32(sums + 4 * i)
            store_f32(sums + 4 * i, value)
    return total
