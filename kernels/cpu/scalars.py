"""Single values at plain addresses, runs of floats, and atomic counters, as numba intrinsics: IR costs less to compile than calls.

It knows bits and bytes, not what they mean to a kernel. `form` is a number of `emit.FORMATS`.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.emit import BLOCK, EVENS_FIRST, F16, F32, FORMATS, I8, I16, I32, I64, LANES, at, load, store

_int, _float, _nothing = types.int64, types.float32, types.void
PAIR = 2 * LANES


@intrinsic
def word(typingctx, args, index):
    """Word `index` of the int64 array at `args`."""

    def codegen(context, builder, signature, args):
        return load(builder, builder.add(args[0], builder.shl(args[1], I64(3))), I64)

    return _int(_int, _int), codegen


@intrinsic
def float_word(typingctx, args, index):
    """The float32 in the low half of word `index`."""

    def codegen(context, builder, signature, args):
        return load(builder, builder.add(args[0], builder.shl(args[1], I64(3))), F32)

    return _float(_int, _int), codegen


@intrinsic
def load_i32(typingctx, address):
    """The int32 at `address`, widened."""
    return _int(_int), lambda context, builder, signature, args: builder.sext(load(builder, args[0], I32), I64)


@intrinsic
def load_f32(typingctx, address):
    """The float32 at `address`."""
    return _float(_int), lambda context, builder, signature, args: load(builder, args[0], F32)


@intrinsic
def store_f32(typingctx, address, value):
    """A float32 to `address`."""

    def codegen(context, builder, signature, args):
        store(builder, args[1], args[0])
        return context.get_dummy_value()

    return _nothing(_int, _float), codegen


@intrinsic
def store_i64(typingctx, address, value):
    """An int64 to `address`."""

    def codegen(context, builder, signature, args):
        store(builder, args[1], args[0])
        return context.get_dummy_value()

    return _nothing(_int, _int), codegen


@intrinsic
def set_floats(typingctx, address, low, high, value):
    """`value` to floats low..high-1 of the array at `address`."""

    def codegen(context, builder, signature, args):
        address, low, high, value = args
        with cgutils.for_range_slice(builder, low, high, I64(1), I64) as (i, _):
            store(builder, value, builder.add(address, builder.shl(i, I64(2))))
        return context.get_dummy_value()

    return _nothing(_int, _int, _int, _float), codegen


@intrinsic
def copy_floats(typingctx, source, target, count):
    """`count` floats from one address to another."""

    def codegen(context, builder, signature, args):
        source, target, count = args
        with cgutils.for_range(builder, count, intp=I64) as loop:
            step = builder.shl(loop.index, I64(2))
            store(builder, load(builder, builder.add(source, step), F32), builder.add(target, step))
        return context.get_dummy_value()

    return _nothing(_int, _int, _int), codegen


@intrinsic
def lane(typingctx, index, dim, form):
    """Where value `index` of a row of `dim` lies once decoded in the order of `form`'s blocks (see emit.EVENS_FIRST)."""

    def codegen(context, builder, signature, args):
        index, dim, form = args
        in_block = builder.icmp_signed("<", index, builder.and_(dim, I64(-BLOCK)))
        chosen = builder.or_(*(builder.icmp_signed("==", form, I64(number)) for number in EVENS_FIRST))
        inside = builder.and_(index, I64(PAIR - 1))
        odd = builder.mul(builder.and_(inside, I64(1)), I64(LANES))
        moved = builder.add(builder.and_(index, I64(-PAIR)), builder.add(builder.lshr(inside, I64(1)), odd))
        return builder.select(builder.and_(in_block, chosen), moved, index)

    return _int(_int, _int, _int), codegen


@intrinsic
def load_raw(typingctx, form, row, index):
    """Value `index` of the raw row at `row` as float32."""

    def codegen(context, builder, signature, args):
        form, row, index = args
        result = cgutils.alloca_once(builder, F32)
        with builder.if_else(builder.icmp_signed("==", form, I64(FORMATS["float32"]))) as (wide, narrow):
            with wide:
                builder.store(load(builder, builder.add(row, builder.shl(index, I64(2))), F32), result)
            with narrow:
                bits = load(builder, builder.add(row, builder.shl(index, I64(1))), I16)
                shifted = builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)
                half = builder.fpext(builder.bitcast(bits, F16), F32)
                builder.store(builder.select(builder.icmp_signed("==", form, I64(FORMATS["bfloat16"])), shifted, half), result)
        return builder.load(result)

    return _float(_int, _int, _int), codegen


@intrinsic
def store_raw(typingctx, form, row, index, value):
    """Round a float32 once, ties to even, to value `index` of the raw row at `row`."""

    def codegen(context, builder, signature, args):
        form, row, index, value = args
        with builder.if_else(builder.icmp_signed("==", form, I64(FORMATS["float32"]))) as (wide, narrow):
            with wide:
                store(builder, value, builder.add(row, builder.shl(index, I64(2))))
            with narrow:
                half = builder.bitcast(builder.fptrunc(value, F16), I16)
                chosen = builder.icmp_signed("==", form, I64(FORMATS["bfloat16"]))
                store(builder, builder.select(chosen, _bfloat16(builder, value), half), builder.add(row, builder.shl(index, I64(1))))
        return context.get_dummy_value()

    return _nothing(_int, _int, _int, _float), codegen


@intrinsic
def decoded_value(typingctx, form, codes, scales, index):
    """Value `index` of an encoded row, scale applied."""

    def codegen(context, builder, signature, args):
        form, codes, scales, index = args
        result = cgutils.alloca_once(builder, F32)
        done = builder.append_basic_block("decoded")
        chosen = builder.switch(form, done)
        for name, number in FORMATS.items():
            block = builder.append_basic_block(name)
            chosen.add_case(I64(number), block)
            builder.position_at_end(block)
            builder.store(_decoded(builder, name, codes, scales, index), result)
            builder.branch(done)
        builder.position_at_end(done)
        return builder.load(result)

    return _float(_int, _int, _int, _int), codegen


@intrinsic
def take(typingctx, counter):
    """Add one to the int64 at `counter`, atomically; what it was before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", at(builder, args[0], I64), I64(1), "acq_rel")

    return _int(_int), codegen


def _bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    bits = builder.bitcast(value, I32)
    even = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.lshr(builder.add(builder.add(bits, I32(0x7FFF)), even), I32(16))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), I32(0x7FC0), rounded), I16)


def _decoded(builder: ir.IRBuilder, name: str, codes: ir.Value, scales: ir.Value, index: ir.Value) -> ir.Value:
    if name == "float32":
        return load(builder, builder.add(codes, builder.shl(index, I64(2))), F32)
    if name in ("bfloat16", "float16"):
        bits = load(builder, builder.add(codes, builder.shl(index, I64(1))), I16)
        return (
            builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)
            if name == "bfloat16"
            else builder.fpext(builder.bitcast(bits, F16), F32)
        )
    if name == "fp8":
        return _float8(builder, builder.zext(load(builder, builder.add(codes, index), I8), I32))
    if name == "int8":
        scale = load(builder, scales, F32)
    else:
        scale = builder.fpext(load(builder, builder.add(scales, builder.shl(builder.lshr(index, I64(5)), I64(1))), F16), F32)
    if name == "q4_0":
        byte = builder.zext(load(builder, builder.add(codes, builder.lshr(index, I64(1))), I8), I32)
        shift = builder.trunc(builder.shl(builder.and_(index, I64(1)), I64(2)), I32)
        code = builder.sub(builder.and_(builder.lshr(byte, shift), I32(15)), I32(8))
    else:
        code = builder.sext(load(builder, builder.add(codes, index), I8), I32)
    return builder.fmul(builder.sitofp(code, F32), scale)


def _float8(builder: ir.IRBuilder, code: ir.Value) -> ir.Value:
    size = builder.and_(code, I32(0x7F))
    bits = builder.or_(builder.shl(size, I32(20)), builder.shl(builder.and_(code, I32(0x80)), I32(24)))
    value = builder.fmul(builder.bitcast(bits, F32), F32(2.0**120))
    return builder.select(builder.icmp_signed("==", size, I32(0x7F)), F32(float("nan")), value)
