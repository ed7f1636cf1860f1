"""rope, rms_norm with its residual, and the gated activation, compiled: one pass over each row, rounded where the reference rounds.

float32 and bfloat16 rows. It does not know about layers or positions; it gets the angles' cosines and sines.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compiled import kernel
from kernels.cpu.emit import F32, FORMATS, I16, I32, I64, LANES, constant, exp_below, fma, load, splat, store, summed
from kernels.cpu.scalars import float_word, take, word

# Words of a call. Rows are [outer, inner] of them: `outer` and `inner` strides in bytes; the answer is dense.
NEXT_TASK, TASKS, OP, FORM, ROWS, INNER, PER_TASK = 0, 1, 2, 3, 4, 5, 6
X, X_OUTER, X_INNER, OUT, SIZE = 7, 8, 9, 10, 11
A, A_OUTER, A_INNER, B, HALF, EPS = 12, 13, 14, 15, 16, 17
ROPE, NORM, NORM_ADD, SILU, GELU_TANH = range(5)

_int, _float, _nothing = types.int64, types.float32, types.void


@intrinsic
def rope_row(typingctx, form, x, half, dim, cos, sin, out):
    """One head: lanes i and half + i turned by angle i; lanes past 2 * half as they are."""

    def emit(builder: ir.IRBuilder, form: int, args: list[ir.Value]) -> None:
        x, half, dim, cos, sin, out = args
        second = builder.add(x, builder.mul(half, I64(_bytes(form)))), builder.add(out, builder.mul(half, I64(_bytes(form))))

        def turn(i: ir.Value, lanes: int) -> None:
            a, b = (_load(builder, form, base, i, lanes) for base in (x, second[0]))
            c, s = (_load(builder, FORMATS["float32"], base, i, lanes) for base in (cos, sin))
            _store(builder, form, out, i, builder.fsub(builder.fmul(a, c), builder.fmul(b, s)))
            _store(builder, form, second[1], i, builder.fadd(builder.fmul(b, c), builder.fmul(a, s)))

        _sweep(builder, I64(0), half, turn)
        _sweep(builder, builder.shl(half, I64(1)), dim, lambda i, lanes: _store(builder, form, out, i, _load(builder, form, x, i, lanes)))

    return _nothing(*([_int] * 7)), _both_forms(emit)


@intrinsic
def norm_row(typingctx, form, added, x, residual, weight, size, eps, total, out):
    """total = x + residual when `added`, else x is its own total; out = total / rms(total) * weight (float32)."""

    def emit(builder: ir.IRBuilder, form: int, args: list[ir.Value]) -> None:
        added, x, residual, weight, size, eps, total, out = args
        with builder.if_then(builder.icmp_signed("!=", added, I64(0))):

            def add(i: ir.Value, lanes: int) -> None:
                _store(builder, form, total, i, builder.fadd(_load(builder, form, x, i, lanes), _load(builder, form, residual, i, lanes)))

            _sweep(builder, I64(0), size, add)
        squares = {lanes: cgutils.alloca_once_value(builder, constant(0.0, ir.VectorType(F32, lanes))) for lanes in (LANES, 1)}

        def square(i: ir.Value, lanes: int) -> None:
            value = _load(builder, form, total, i, lanes)
            builder.store(fma(builder, value, value, builder.load(squares[lanes])), squares[lanes])

        _sweep(builder, I64(0), size, square)
        whole = builder.fadd(*(summed(builder, builder.load(part)) for part in squares.values()))
        mean = builder.fadd(builder.fdiv(whole, builder.sitofp(size, F32)), eps)
        sqrt = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32]), "llvm.sqrt.f32")
        inverse = builder.fdiv(F32(1.0), builder.call(sqrt, [mean]))

        def scale(i: ir.Value, lanes: int) -> None:
            value = _load(builder, form, total, i, lanes)
            normed = builder.fmul(value, splat(builder, inverse, value.type))
            _store(builder, form, out, i, builder.fmul(normed, _load(builder, FORMATS["float32"], weight, i, lanes)))

        _sweep(builder, I64(0), size, scale)

    return _nothing(_int, _int, _int, _int, _int, _int, _float, _int, _int), _both_forms(emit)


@intrinsic
def gate_row(typingctx, form, gelu, x, size, out):
    """act(x[:size]) * x[size:2 * size]; both activations are a gate times a logistic function of it."""

    def emit(builder: ir.IRBuilder, form: int, args: list[ir.Value]) -> None:
        gelu, x, size, out = args
        up_at = builder.add(x, builder.mul(size, I64(_bytes(form))))

        def gate(i: ir.Value, lanes: int) -> None:
            value, up = _load(builder, form, x, i, lanes), _load(builder, form, up_at, i, lanes)
            kind = value.type
            # gelu_tanh: (1 + tanh u) / 2 is the logistic function of 2u, u = sqrt(2 / pi) (g + 0.044715 g^3)
            cubed = builder.fmul(builder.fmul(builder.fmul(value, value), value), constant(0.044715, kind))
            bent = builder.fmul(builder.fadd(value, cubed), constant(1.5957691216057308, kind))
            chosen = builder.select(builder.icmp_signed("!=", gelu, I64(0)), bent, value)
            act = builder.fmul(value, _logistic(builder, chosen))
            _store(builder, form, out, i, builder.fmul(act, up))

        _sweep(builder, I64(0), size, gate)

    return _nothing(*([_int] * 5)), _both_forms(emit)


def make_layers():
    """The kernel for all three ops."""

    @kernel
    def layers(args):
        op, form, size, half = word(args, OP), word(args, FORM), word(args, SIZE), word(args, HALF)
        width = 4 if form == 0 else 2
        while True:
            number = take(args + 8 * NEXT_TASK)
            if number >= word(args, TASKS):
                return
            first = number * word(args, PER_TASK)
            for row in range(first, min(first + word(args, PER_TASK), word(args, ROWS))):
                outer = row // word(args, INNER)
                inner = row - outer * word(args, INNER)
                x = word(args, X) + outer * word(args, X_OUTER) + inner * word(args, X_INNER)
                out = word(args, OUT) + row * size * width
                if op == ROPE:
                    rope_row(
                        form, x, half, size, word(args, A) + outer * word(args, A_OUTER), word(args, B) + outer * word(args, A_OUTER), out
                    )
                elif op == NORM:
                    norm_row(form, 0, x, x, word(args, B), size, float_word(args, EPS), x, out)
                elif op == NORM_ADD:
                    residual = word(args, A) + outer * word(args, A_OUTER) + inner * word(args, A_INNER)
                    norm_row(form, 1, x, residual, word(args, B), size, float_word(args, EPS), word(args, HALF) + row * size * width, out)
                else:
                    gate_row(form, op - SILU, x, size, out)

    return layers


def _both_forms(emit: Callable[[ir.IRBuilder, int, list[ir.Value]], None]):
    def codegen(context, builder, signature, args):
        with builder.if_else(builder.icmp_signed("==", args[0], I64(FORMATS["float32"]))) as (wide, narrow):
            with wide:
                emit(builder, FORMATS["float32"], list(args[1:]))
            with narrow:
                emit(builder, FORMATS["bfloat16"], list(args[1:]))
        return context.get_dummy_value()

    return codegen


def _sweep(builder: ir.IRBuilder, low: ir.Value, high: ir.Value, body: Callable[[ir.Value, int], None]) -> None:
    """body(i, lanes) over low..high-1: LANES at a time, then one by one."""
    whole = builder.add(low, builder.and_(builder.sub(high, low), I64(-LANES)))
    with cgutils.for_range_slice(builder, low, whole, I64(LANES), I64) as (i, _):
        body(i, LANES)
    with cgutils.for_range_slice(builder, whole, high, I64(1), I64) as (i, _):
        body(i, 1)


def _bytes(form: int) -> int:
    return 4 if form == FORMATS["float32"] else 2


def _load(builder: ir.IRBuilder, form: int, base: ir.Value, index: ir.Value, lanes: int) -> ir.Value:
    where, kind = builder.add(base, builder.mul(index, I64(_bytes(form)))), ir.VectorType(F32, lanes)
    if form == FORMATS["float32"]:
        return load(builder, where, kind)
    ints = ir.VectorType(I32, lanes)
    return builder.bitcast(builder.shl(builder.zext(load(builder, where, ir.VectorType(I16, lanes)), ints), constant(16, ints)), kind)


def _store(builder: ir.IRBuilder, form: int, base: ir.Value, index: ir.Value, value: ir.Value) -> None:
    where = builder.add(base, builder.mul(index, I64(_bytes(form))))
    if form == FORMATS["float32"]:
        store(builder, value, where)
        return
    ints = ir.VectorType(I32, value.type.count)
    bits = builder.bitcast(value, ints)
    even = builder.and_(builder.lshr(bits, constant(16, ints)), constant(1, ints))
    rounded = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF, ints)), even), constant(16, ints))
    rounded = builder.select(builder.fcmp_unordered("uno", value, value), constant(0x7FC0, ints), rounded)
    store(builder, builder.trunc(rounded, ir.VectorType(I16, value.type.count)), where)


def _logistic(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """1 / (1 + exp(-x)) from exp of a negative number only, so that nothing overflows."""
    kind = x.type
    zero, one = constant(0.0, kind), constant(1.0, kind)
    positive = builder.fcmp_ordered(">", x, zero)
    small = exp_below(builder, builder.select(positive, builder.fsub(zero, x), x))
    return builder.fdiv(builder.select(positive, one, small), builder.fadd(one, small))
