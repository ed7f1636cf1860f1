"""Writing rows, compiled: each is encoded once, in its format's own rounding, straight into the store.

Formats are `kernels/codec.py`'s. It does not know whose row a slot is.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compiled import inline, kernel
from kernels.cpu.emit import BLOCK, F16, F32, FORMATS, I8, I32, I64, at, store
from kernels.cpu.scalars import load_f32, load_raw, store_f32, store_i64, take, word

# Words of a call; scratch holds one row as float32 for each thread.
NEXT_TASK, NEXT_THREAD, TASKS, SCRATCH, SCRATCH_BYTES = 0, 1, 2, 3, 4
ROWS, ROWS_TOKEN, ROWS_HEAD, ROWS_FORM, ROW_BYTES = 5, 6, 7, 8, 9
SLOTS, TOKENS, HEADS, DIM, COUNT, FAULTS = 10, 11, 12, 13, 14, 15
CODES, CODES_ROW, CODES_HEAD, SCALES, SCALES_ROW, SCALES_HEAD, FORM = range(16, 23)

TASK_TOKENS = 16
INT8, Q8_0, Q4_0, FP8 = (FORMATS[name] for name in ("int8", "q8_0", "q4_0", "fp8"))
FLOAT16_MAX, FLOAT32_MAX = 65504.0, float(np.finfo(np.float32).max)

_int, _float, _nothing = types.int64, types.float32, types.void


@intrinsic
def copy_bytes(typingctx, source, target, count):
    """`count` bytes from one address to another; they do not overlap."""

    def codegen(context, builder, signature, args):
        source, target, count = args
        cgutils.raw_memcpy(builder, at(builder, target, I8), at(builder, source, I8), count, 1)
        return context.get_dummy_value()

    return _nothing(_int, _int, _int), codegen


@intrinsic
def store_byte(typingctx, address, value):
    """The low eight bits of an int64 to `address`."""

    def codegen(context, builder, signature, args):
        store(builder, builder.trunc(args[1], I8), args[0])
        return context.get_dummy_value()

    return _nothing(_int, _int), codegen


@intrinsic
def store_half(typingctx, address, value):
    """A float32 as float16 to `address`; what it reads back as."""

    def codegen(context, builder, signature, args):
        half = builder.fptrunc(args[1], F16)
        store(builder, half, args[0])
        return builder.fpext(half, F32)

    return _float(_int, _float), codegen


@intrinsic
def code_of(typingctx, value, step, low, high):
    """value / step to the nearest integer within low..high, ties to even; a step of zero means zero."""

    def codegen(context, builder, signature, args):
        value, step, low, high = args
        rint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32]), "llvm.rint.f32")
        nearest = builder.call(rint, [builder.fdiv(value, step)])
        nearest = builder.select(builder.fcmp_ordered("==", step, F32(0.0)), F32(0.0), nearest)
        nearest = builder.select(builder.fcmp_ordered(">", nearest, low), nearest, low)
        nearest = builder.select(builder.fcmp_ordered("<", nearest, high), nearest, high)
        return builder.fptosi(nearest, I64)

    return _int(_float, _float, _float, _float), codegen


@intrinsic
def float8_code(typingctx, value):
    """The e4m3fn code nearest to a float32, ties to even, clamped to +-448; NaN is 0x7f."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], I32)
        size = builder.and_(bits, I32(0x7FFFFFFF))
        most = builder.bitcast(F32(448.0), I32)
        size = builder.select(builder.icmp_signed("<", size, most), size, most)
        even = builder.and_(builder.lshr(size, I32(20)), I32(1))
        normal = builder.sub(builder.lshr(builder.add(builder.add(size, I32(0x7FFFF)), even), I32(20)), I32(120 << 3))
        rint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32]), "llvm.rint.f32")
        small = builder.fptosi(builder.call(rint, [builder.fmul(builder.bitcast(size, F32), F32(512.0))]), I32)
        code = builder.select(builder.icmp_signed("<", size, builder.bitcast(F32(2.0**-6), I32)), small, normal)
        code = builder.or_(code, builder.and_(builder.lshr(bits, I32(24)), I32(0x80)))
        return builder.zext(builder.select(builder.fcmp_unordered("uno", args[0], args[0]), I32(0x7F), code), I64)

    return _int(_float), codegen


@inline
def _encode_group(form, x, low, high, codes, scale_at):
    """Values low..high-1 of the float32 row at `x`, which share the scale at `scale_at`."""
    largest = signed = np.float32(0)
    for i in range(low, high):
        value = load_f32(x + 4 * i)
        if abs(value) > largest:
            largest, signed = abs(value), value
    if form == INT8:
        step = min(largest / np.float32(127), np.float32(FLOAT32_MAX))
        store_f32(scale_at, step)
    else:
        step = signed / np.float32(-8) if form == Q4_0 else largest / np.float32(127)
        step = store_half(scale_at, max(min(step, np.float32(FLOAT16_MAX)), np.float32(-FLOAT16_MAX)))
    if form != Q4_0:
        for i in range(low, high):
            store_byte(codes + i, code_of(load_f32(x + 4 * i), step, np.float32(-127), np.float32(127)))
        return
    for i in range(low, high, 2):
        even = code_of(load_f32(x + 4 * i), step, np.float32(-8), np.float32(7)) + 8
        odd = np.int64(0)
        if i + 1 < high:
            odd = code_of(load_f32(x + 4 * i + 4), step, np.float32(-8), np.float32(7)) + 8
        store_byte(codes + i // 2, even + 16 * odd)


def make_write():
    """The kernel for write_rows."""

    @kernel
    def write(args):
        dim, form, heads = word(args, DIM), word(args, FORM), word(args, HEADS)
        x = word(args, SCRATCH) + take(args + 8 * NEXT_THREAD) * word(args, SCRATCH_BYTES)
        while True:
            number = take(args + 8 * NEXT_TASK)
            if number >= word(args, TASKS):
                return
            for token in range(number * TASK_TOKENS, min((number + 1) * TASK_TOKENS, word(args, TOKENS))):
                slot = word(word(args, SLOTS), token)
                if slot < 0 or slot >= word(args, COUNT):
                    store_i64(args + 8 * FAULTS, np.int64(1))
                    continue
                for head in range(heads):
                    source = word(args, ROWS) + token * word(args, ROWS_TOKEN) + head * word(args, ROWS_HEAD)
                    codes = word(args, CODES) + slot * word(args, CODES_ROW) + head * word(args, CODES_HEAD)
                    scales = word(args, SCALES) + slot * word(args, SCALES_ROW) + head * word(args, SCALES_HEAD)
                    if form < INT8:
                        copy_bytes(source, codes, word(args, ROW_BYTES))
                        continue
                    for i in range(dim):
                        store_f32(x + 4 * i, load_raw(word(args, ROWS_FORM), source, i))
                    if form == FP8:
                        for i in range(dim):
                            store_byte(codes + i, float8_code(load_f32(x + 4 * i)))
                    elif form == INT8:
                        _encode_group(form, x, np.int64(0), dim, codes, scales)
                    else:
                        for low in range(0, dim, BLOCK):
                            _encode_group(form, x, low, min(low + BLOCK, dim), codes, scales + 2 * (low // BLOCK))

    return write
