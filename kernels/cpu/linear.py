"""x @ weight.T for a few rows of x, compiled: each weight row is read once, in its own dtype, for all of them.

This is a decode step's product, which waits for memory, not for arithmetic. It does not know what the weights are for.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import kernel
from kernels.cpu.scalars import lane, load_f32, load_raw, set_floats, store_f32, store_i64, store_raw, take, word
from kernels.cpu.softmax import CHUNK
from kernels.cpu.streams import dot_rows

# Words of a call; scratch holds slots, a tile of answers and the rows of x as float32 for each thread.
NEXT_TASK, NEXT_THREAD, TASKS, SCRATCH, SCRATCH_BYTES = 0, 1, 2, 3, 4
X, X_STEP, FORM, TOKENS, INNER, WEIGHT, WEIGHT_STEP, OUTPUTS, BIAS, BIASED, OUT, OUT_STEP, TASK_ROWS = range(5, 18)

GROUPS = (1, 2, 3, 4)  # rows of x that share one pass over a weight row
PER_TASK = CHUNK  # weight rows of a task


def group_of(tokens: int) -> int:
    """Rows of x a pass."""
    return min(GROUPS, key=lambda size: (-(-tokens // size), size))


def scratch_bytes(tokens: int, inner: int) -> int:
    """Bytes that one thread works in."""
    group = group_of(tokens)
    return 8 * (CHUNK + 4) + 4 * group * CHUNK + 4 * (-(-tokens // group) * group) * inner


def make_linear(group: int):
    """The kernel for `group` rows of x a pass."""

    @kernel
    def linear(args):
        form, inner, tokens = word(args, FORM), word(args, INNER), word(args, TOKENS)
        slots = word(args, SCRATCH) + take(args + 8 * NEXT_THREAD) * word(args, SCRATCH_BYTES)
        answers = slots + 8 * (CHUNK + 4)
        rows = answers + 4 * group * CHUNK
        padded = (tokens + group - 1) // group * group
        for t in range(tokens):
            source = word(args, X) + t * word(args, X_STEP)
            for i in range(inner):
                store_f32(rows + 4 * (t * inner + lane(i, inner, form)), load_raw(form, source, i))
        set_floats(rows, tokens * inner, padded * inner, np.float32(0))
        while True:
            number = take(args + 8 * NEXT_TASK)
            if number >= word(args, TASKS):
                return
            first = number * word(args, TASK_ROWS)
            count = min(word(args, TASK_ROWS), word(args, OUTPUTS) - first)
            for i in range(CHUNK + 4):  # four more: rows to prefetch
                store_i64(slots + 8 * i, min(first + i, word(args, OUTPUTS) - 1))
            for low in range(0, padded, group):
                dot_rows(
                    group, form, rows + 4 * low * inner, inner, 1, 1, word(args, WEIGHT), word(args, WEIGHT_STEP), 0, 0, 0, 0, slots,
                    (count + 3) // 4 * 4, answers, slots + 32, word(args, WEIGHT_STEP), 0, 0, 0,
                )  # fmt: skip
                for t in range(low, min(low + group, tokens)):
                    out = word(args, OUT) + t * word(args, OUT_STEP)
                    for i in range(count):
                        value = load_f32(answers + 4 * ((t - low) * CHUNK + i))
                        if word(args, BIASED) != 0:
                            value += load_raw(form, word(args, BIAS), first + i)
                        store_raw(form, out, first + i, value)

    return linear
