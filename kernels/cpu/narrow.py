"""Products of bfloat16 pairs by the host's own instruction (AVX-512 BF16: vdpbf16ps), and a small matrix product made of them.

A pair of neighbouring columns is one 32-bit word. It does not know what the numbers mean.
"""

from __future__ import annotations

import struct
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.emit import BLOCK, FORMATS, I8, I16, I32, I64, LANES, VF, VI, constant, decoded_block, load, offset, splat, store
from kernels.cpu.micro import PANEL, TILE_ROWS

_int, _nothing = types.int64, types.void


class _BFloat(ir.Type):
    """LLVM's `bfloat`, which llvmlite has no class for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


VB = ir.VectorType(_BFloat(), BLOCK)
VW = ir.VectorType(I16, BLOCK)


@cache
def host_multiplies_bfloat16() -> bool:
    """Whether this host has the instruction."""
    return llvm.get_host_cpu_features().get("avx512bf16", False)


def dot(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """total [16] + a . b of each pair of columns, in float32."""
    kind = ir.FunctionType(VF, [VF, VB, VB])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512"), [total, a, b])


def narrow_block(builder: ir.IRBuilder, form: int, codes: ir.Value) -> ir.Value:
    """The 32 values at address `codes` in their own order, without their scale. Exact in every format that has eight bits or fewer."""
    if form == FORMATS["bfloat16"]:
        return load(builder, codes, VB)
    if form == FORMATS["q4_0"]:
        bytes_ = builder.zext(load(builder, codes, ir.VectorType(I8, LANES)), VI)
        # The low and the high half of each byte side by side, as numbers of a table of values; bits above the lowest five are ignored.
        halves = builder.bitcast(builder.or_(bytes_, builder.shl(bytes_, constant(12, VI))), VW)
        return builder.bitcast(_permuted(builder, ir.Constant(VW, [_bits(code % 16 - 8) for code in range(BLOCK)]), halves), VB)
    low, high = decoded_block(builder, form, codes, None)
    kind = ir.FunctionType(VB, [VF, VF])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512"), [high, low])


def _permuted(builder: ir.IRBuilder, table: ir.Value, numbers: ir.Value) -> ir.Value:
    kind = ir.FunctionType(VW, [VW, VW])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512"), [table, numbers])


def _bits(value: int) -> int:
    """A small integer as bfloat16."""
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


@intrinsic
def matmul_pairs(typingctx, a, a_bytes, b, b_bytes, c, c_bytes, rows, columns, pairs):
    """c [rows, columns] float32 = a [rows, pairs] @ b [pairs, columns], a and b words of two bfloat16; strides in bytes.

    rows must be a multiple of TILE_ROWS and columns of PANEL. The order of additions depends on nothing but `pairs`.
    """

    def codegen(context, builder, signature, args):
        a, a_bytes, b, b_bytes, c, c_bytes, rows, columns, pairs = args
        with cgutils.for_range_slice(builder, I64(0), columns, I64(PANEL), I64) as (column, _):
            b_panel, c_panel = (builder.add(base, builder.shl(column, I64(2))) for base in (b, c))
            with cgutils.for_range_slice(builder, I64(0), rows, I64(TILE_ROWS), I64) as (row, _):
                a_rows = [builder.add(a, builder.mul(builder.add(row, I64(i)), a_bytes)) for i in range(TILE_ROWS)]
                c_rows = [builder.add(c_panel, builder.mul(builder.add(row, I64(i)), c_bytes)) for i in range(TILE_ROWS)]
                sums = [[cgutils.alloca_once_value(builder, constant(0.0, VF)) for _ in range(2)] for _ in range(TILE_ROWS)]
                for each in (total for pair in sums for total in pair):
                    builder.store(constant(0.0, VF), each)
                with cgutils.for_range(builder, pairs, intp=I64) as k:
                    b_at = builder.add(b_panel, builder.mul(k.index, b_bytes))
                    b_parts = [builder.bitcast(load(builder, offset(builder, b_at, 4 * LANES * part), VI), VB) for part in range(2)]
                    for a_row, pair in zip(a_rows, sums, strict=True):
                        word = load(builder, builder.add(a_row, builder.shl(k.index, I64(2))), I32)
                        value = builder.bitcast(splat(builder, word, VI), VB)
                        for part, total in zip(b_parts, pair, strict=True):
                            builder.store(dot(builder, value, part, builder.load(total)), total)
                for c_row, pair in zip(c_rows, sums, strict=True):
                    for part, total in enumerate(pair):
                        store(builder, builder.load(total), offset(builder, c_row, 4 * LANES * part))
        return context.get_dummy_value()

    return _nothing(*([_int] * 9)), codegen
