"""Single values at plain addresses, their bits, and atomic counters, as numba intrinsics.

It knows bits and bytes, not what they mean to a kernel.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.emit import F16, F32, I8, I16, I32, I64, at, load, store

_LLVM = {types.int64: I64, types.int32: I32, types.int8: I8, types.uint8: I8, types.uint16: I16, types.float32: F32}


def _loader(kind):
    def typed(typingctx, address):
        def codegen(context, builder, signature, args):
            return load(builder, args[0], _LLVM[kind])

        return kind(types.int64), codegen

    return typed


def _storer(kind):
    def typed(typingctx, address, value):
        def codegen(context, builder, signature, args):
            store(builder, args[1], args[0])
            return context.get_dummy_value()

        return types.void(types.int64, kind), codegen

    return typed


load_i64, load_i32, load_u8, load_u16, load_f32, load_i8 = (
    intrinsic(_loader(kind)) for kind in (types.int64, types.int32, types.uint8, types.uint16, types.float32, types.int8)
)
store_i64, store_u8, store_u16, store_f32, store_i8 = (
    intrinsic(_storer(kind)) for kind in (types.int64, types.uint8, types.uint16, types.float32, types.int8)
)


@intrinsic
def bits_of(typingctx, value):
    """The bits of a float32 as int32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], I32)


@intrinsic
def float_of(typingctx, bits):
    """The float32 with these int32 bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], F32)


@intrinsic
def to_half(typingctx, value):
    """The bits of the float16 nearest to a float32, ties to even."""
    return types.uint16(types.float32), lambda context, builder, signature, args: builder.bitcast(builder.fptrunc(args[0], F16), I16)


@intrinsic
def from_half(typingctx, bits):
    """The float32 that float16 bits stand for."""
    return types.float32(types.uint16), lambda context, builder, signature, args: builder.fpext(builder.bitcast(args[0], F16), F32)


@intrinsic
def take(typingctx, counter):
    """Add one to the int64 at `counter`, atomically; what it was before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", at(builder, args[0], I64), I64(1), "acq_rel")

    return types.int64(types.int64), codegen
