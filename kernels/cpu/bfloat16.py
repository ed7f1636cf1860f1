"""x @ weight.T for a few bfloat16 rows of x where the host multiplies bfloat16 itself (AVX-512 BF16): nothing is widened first.

Words of a call are `linear.py`'s; it needs no scratch. Each sum is one chain over the columns, whatever the number of rows, so
that a row's answer does not depend on its batch mates. It does not know what the weights are for.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compiled import kernel
from kernels.cpu.emit import BLOCK, F32, I16, I32, I64, VF, constant, load, prefetch, store, summed_each
from kernels.cpu.linear import (
    BIAS,
    BIASED,
    INNER,
    NEXT_TASK,
    OUT,
    OUT_STEP,
    OUTPUTS,
    TASK_ROWS,
    TASKS,
    TOKENS,
    WEIGHT,
    WEIGHT_STEP,
    X_STEP,
    X,
)
from kernels.cpu.narrow import VB, dot
from kernels.cpu.scalars import take, word

GROUPS = (1, 2, 4)  # rows of x that share one pass over a weight row
ROWS = 4  # weight rows whose sums are reduced together; an output must have as many
WIDTH = 2  # bytes
TASK_BYTES = 1 << 16
AHEAD = 2048  # bytes from what is multiplied to what is prefetched where rows are read one after another

_int, _nothing = types.int64, types.void


def task_rows(inner: int) -> int:
    """Weight rows of a task: few enough that no thread ends late, enough that most are prefetched."""
    return max(ROWS, TASK_BYTES // (WIDTH * inner) // ROWS * ROWS)


def group_of(tokens: int) -> int:
    """Rows of x a pass."""
    return next((size for size in GROUPS if size >= tokens), GROUPS[-1])


@intrinsic(prefer_literal=True)
def dot_block(typingctx, group, x, x_step, tokens, weight, weight_step, inner, biased, bias, out, out_step):
    """out[t, r] = x[t] . weight[r] + bias[r] for the first `group` of `tokens` rows and ROWS weight rows; steps in bytes.

    Weight rows are read one after another, to their end: memory streams best in its own order. Only where arithmetic weighs as much
    do ROWS of them share what is loaded of x.
    """
    shared = group.literal_value
    at_once = ROWS if shared == 4 else 1

    def codegen(context, builder, signature, args):
        _, x, x_step, tokens, weight, weight_step, inner, biased, bias, out, out_step = args
        last = builder.sub(tokens, I64(1))
        x_at = []
        for t in range(shared):
            row = builder.select(builder.icmp_signed("<", I64(t), last), I64(t), last)
            x_at.append(builder.add(x, builder.mul(row, x_step)))
        sums = [[cgutils.alloca_once_value(builder, constant(0.0, VF)) for _ in range(ROWS)] for _ in range(shared)]
        size = builder.mul(inner, I64(WIDTH))
        ahead = I64(AHEAD) if at_once == 1 else builder.mul(weight_step, I64(ROWS))
        for first in range(0, ROWS, at_once):
            rows = range(first, first + at_once)
            weight_at = [builder.add(weight, builder.mul(weight_step, I64(r))) for r in rows]
            with cgutils.for_range_slice(builder, I64(0), size, I64(WIDTH * BLOCK), I64) as (at, _):
                inputs = [load(builder, builder.add(base, at), VB) for base in x_at]
                for r, base in zip(rows, weight_at, strict=True):
                    here = builder.add(base, at)
                    prefetch(builder, builder.add(here, ahead), 2)
                    weights = load(builder, here, VB)
                    for t in range(shared):
                        builder.store(dot(builder, inputs[t], weights, builder.load(sums[t][r])), sums[t][r])
        for t in range(shared):
            with builder.if_then(builder.icmp_signed("<", I64(t), tokens)):
                found = summed_each(builder, [builder.load(total) for total in sums[t]])
                target = builder.add(out, builder.mul(out_step, I64(t)))
                store(builder, _rounded(builder, _biased(builder, found, biased, bias)), target)
        return context.get_dummy_value()

    return _nothing(group, *([_int] * 10)), codegen


def _biased(builder: ir.IRBuilder, found: ir.Value, biased: ir.Value, bias: ir.Value) -> ir.Value:
    result = cgutils.alloca_once_value(builder, found)
    with builder.if_then(builder.icmp_signed("!=", biased, I64(0))):
        ints = ir.VectorType(I32, ROWS)
        bits = builder.zext(load(builder, bias, ir.VectorType(I16, ROWS)), ints)
        builder.store(builder.fadd(found, builder.bitcast(builder.shl(bits, constant(16, ints)), ir.VectorType(F32, ROWS))), result)
    return builder.load(result)


def _rounded(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Floats to the bits of bfloat16, ties to even."""
    ints = ir.VectorType(I32, value.type.count)
    bits = builder.bitcast(value, ints)
    even = builder.and_(builder.lshr(bits, constant(16, ints)), constant(1, ints))
    rounded = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF, ints)), even), constant(16, ints))
    rounded = builder.select(builder.fcmp_unordered("uno", value, value), constant(0x7FC0, ints), rounded)
    return builder.trunc(rounded, ir.VectorType(I16, value.type.count))


def make_linear(group: int):
    """The kernel for `group` rows of x a pass. `outputs` must be ROWS or more."""

    @kernel
    def linear_bfloat16(args):
        tokens, inner, outputs = word(args, TOKENS), word(args, INNER), word(args, OUTPUTS)
        x_step, weight_step, out_step = word(args, X_STEP), word(args, WEIGHT_STEP), word(args, OUT_STEP)
        while True:
            number = take(args + 8 * NEXT_TASK)
            if number >= word(args, TASKS):
                return
            first = number * word(args, TASK_ROWS)
            for row in range(first, min(first + word(args, TASK_ROWS), outputs), ROWS):
                at = min(row, outputs - ROWS)  # the last rows again rather than rows that are not there
                for low in range(0, tokens, group):
                    dot_block(
                        group, word(args, X) + low * x_step, x_step, tokens - low, word(args, WEIGHT) + at * weight_step, weight_step,
                        inner, word(args, BIASED), word(args, BIAS) + 2 * at, word(args, OUT) + low * out_step + 2 * at, out_step,
                    )  # fmt: skip

    return linear_bfloat16
