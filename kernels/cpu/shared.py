"""What both compiled attention kernels do around their inner loops: slots of keys, queries in, answers out, merging of splits.

The words of a call (`Word`) and of a task (`Task`) are int64; addresses and strides are in bytes. It does not know which
sequence a span belongs to.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from kernels.cpu.emit import BLOCK, EVENS_FIRST, LANES
from kernels.cpu.scalars import bits_of, float_of, from_half, load_f32, load_i8, load_i32, load_i64, load_u8, load_u16, store_f32, store_i64, store_u16, to_half

# Words of an attention call.
NEXT_TASK, NEXT_THREAD, TASKS, SCRATCH, SCRATCH_BYTES, TABLE = 0, 1, 2, 3, 4, 5
Q, Q_TOKEN, Q_HEAD, Q_FORM, OUT = 6, 7, 8, 9, 10
QUERY_HEADS, KV_HEADS, DIM = 11, 12, 13
KEYS, VALUES = 14, 21  # seven words each: codes, bytes a row, bytes a head, then the same for scales, then the format
WHERE, TABLE_WIDTH, PAGE_SIZE = 28, 29, 30  # no pages: page size 0, and WHERE holds each span's first row
PARTIALS, PARTIAL_BYTES, COUNTERS, SCALE, CAPPED, SOFTCAP, WINDOW, SINKS = 31, 32, 33, 34, 35, 36, 37, 38
WORDS = 39

# Words of a task: queries row..row+tokens-1 of span `span`, the first at `position`, over keys low..high-1 of the list that begins
# with `sinks` sinks and goes on from position `first`. `unit` numbers the tasks whose `splits` parts are merged.
SPAN, ROW, TOKENS, POSITION, HEAD, SINK_COUNT, FIRST, LOW, HIGH, SPLIT, SPLITS, UNIT = range(12)
TASK_WORDS = 12

EVEN_A, EVEN_B = EVENS_FIRST
PAIR = 2 * LANES

inline = njit(error_model="numpy", inline="never", nogil=True)


@inline
def word(args, index):
    return load_i64(args + 8 * index)


@inline
def store_words(args, first):
    """The seven words of one store: codes, bytes a row, bytes a head; the same for scales; the format."""
    return (
        word(args, first), word(args, first + 1), word(args, first + 2),
        word(args, first + 3), word(args, first + 4), word(args, first + 5), word(args, first + 6),
    )


@inline
def fill_slots(args, task, low, count, padded, out):
    """The slots of keys low..low+count-1 of the task's list, then the last one again up to `padded` of them."""
    where, size = word(args, WHERE), word(args, PAGE_SIZE)
    span, sinks, first = word(task, SPAN), word(task, SINK_COUNT), word(task, FIRST)
    row_at = where + 4 * span * word(args, TABLE_WIDTH)
    base = load_i64(where + 8 * span) if size == 0 else np.int64(0)
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
        for i in range(run):
            store_i64(out + 8 * (done + i), slot + i)
        slot += run - 1
        done += run
    for i in range(count, padded):
        store_i64(out + 8 * i, slot)


@inline
def lane(index, dim, form):
    """Where value `index` of a row of `dim` lies once decoded in the order of `form`'s blocks."""
    if (form != EVEN_A and form != EVEN_B) or index >= dim // BLOCK * BLOCK:
        return index
    start = index // PAIR * PAIR
    inside = index - start
    return start + inside // 2 + (inside % 2) * LANES


@inline
def value_at(form, address):
    """The value of a raw format at `address` as float32."""
    if form == 0:
        return load_f32(address)
    if form == 1:
        return float_of(np.int32(np.int32(load_u16(address)) << 16))
    return from_half(load_u16(address))


@inline
def decoded_value(form, codes, scales, index):
    """Value `index` of an encoded row."""
    if form == 0:
        return load_f32(codes + 4 * index)
    if form == 1 or form == 2:
        return value_at(form, codes + 2 * index)
    if form == 3:
        return np.float32(load_i8(codes + index)) * load_f32(scales)
    if form == 4:
        return np.float32(load_i8(codes + index)) * from_half(load_u16(scales + 2 * (index // BLOCK)))
    if form == 5:
        nibble = (np.int32(load_u8(codes + index // 2)) >> np.int32(4 * (index % 2))) & 15
        return np.float32(np.int32(nibble) - 8) * from_half(load_u16(scales + 2 * (index // BLOCK)))
    return float8_value(np.int32(load_u8(codes + index)))


@inline
def float8_value(code):
    size = np.int32(code & 127)
    if size == 127:
        return np.float32(np.nan)
    value = float_of(np.int32(size << 20)) * np.float32(2.0**120)
    return -value if code & 128 else value


@inline
def bfloat16_bits(value):
    """The bits of the bfloat16 nearest to a float32, ties to even."""
    if value != value:
        return np.uint16(0x7FC0)
    bits = np.int64(bits_of(value)) & 0xFFFFFFFF
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@inline
def store_value(form, address, value):
    """Round a float32 to a raw format once."""
    if form == 0:
        store_f32(address, value)
    elif form == 1:
        store_u16(address, bfloat16_bits(value))
    else:
        store_u16(address, to_half(value))


@inline
def value_bytes(form):
    return 4 if form == 0 else 2


@inline
def load_query(args, token, head, out, width):
    """One query head as float32 at `out`, in the order of the keys' blocks, zeros up to `width`."""
    dim, form, key_form = word(args, DIM), word(args, Q_FORM), word(args, KEYS + 6)
    source = word(args, Q) + token * word(args, Q_TOKEN) + head * word(args, Q_HEAD)
    size = value_bytes(form)
    for i in range(dim):
        store_f32(out + 4 * lane(i, dim, key_form), value_at(form, source + size * i))
    for i in range(dim, width):
        store_f32(out + 4 * i, np.float32(0))


@inline
def store_answer(args, token, head, sums, total):
    """Weighted sums at `sums` over their total weight, as one row of the answer."""
    dim, form, value_form = word(args, DIM), word(args, Q_FORM), word(args, VALUES + 6)
    size = value_bytes(form)
    target = word(args, OUT) + (token * word(args, QUERY_HEADS) + head) * dim * size
    inverse = np.float32(1) / total
    for i in range(dim):
        store_value(form, target + size * i, load_f32(sums + 4 * lane(i, dim, value_form)) * inverse)


@inline
def cap_scores(scores, count, cap):
    """cap * tanh(score / cap) in place."""
    for i in range(count):
        where = scores + 4 * i
        store_f32(where, cap * np.float32(math.tanh(load_f32(where) / cap)))


@inline
def set_floats(address, low, high, value):
    for i in range(low, high):
        store_f32(address + 4 * i, value)


@inline
def copy_floats(source, target, count):
    for i in range(count):
        store_f32(target + 4 * i, load_f32(source + 4 * i))


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
