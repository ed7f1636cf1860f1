"""The inner loops over a tile as numba intrinsics: a row decoded, a block transposed, a small matrix product.

Arguments are plain addresses and strides in bytes, all int64. It does not know what the numbers are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.emit import (
    BLOCK,
    F32,
    FORMATS,
    I32,
    I64,
    LANES,
    SCALED_ROWS,
    VF,
    block_bytes,
    constant,
    decoded_block,
    fma,
    load,
    offset,
    splat,
    store,
)

TILE_ROWS = 6  # rows that `matmul` works on at a time: with two vectors each they fill the registers of AVX2
PANEL = 2 * LANES  # columns that `matmul` works on at a time

_int, _nothing = types.int64, types.void


@intrinsic
def decode_row(typingctx, form, codes, scales, blocks, out):
    """The first 32 * blocks values of a row as float32 at `out`, in the order of its format's blocks; a scale a row is applied."""

    def emit(builder: ir.IRBuilder, form: int, a: Arguments) -> None:
        with cgutils.for_range(builder, a.blocks, intp=I64) as block:
            code_at = builder.add(a.codes, builder.mul(block.index, I64(block_bytes(form))))
            vectors = decoded_block(builder, form, code_at, builder.add(a.scales, builder.shl(block.index, I64(1))))
            if form in SCALED_ROWS:
                vectors = [builder.fmul(vector, splat(builder, load(builder, a.scales, F32), VF)) for vector in vectors]
            out_at = builder.add(a.out, builder.mul(block.index, I64(4 * BLOCK)))
            for part, vector in enumerate(vectors):
                store(builder, vector, offset(builder, out_at, 4 * LANES * part))

    def codegen(context, builder, signature, args):
        a = Arguments(("form", "codes", "scales", "blocks", "out"), args)
        for_each_format(builder, a.form, lambda form: emit(builder, form, a), FORMATS.values())
        return context.get_dummy_value()

    return _nothing(*([_int] * 5)), codegen


@intrinsic
def transpose(typingctx, source, source_bytes, target, target_bytes):
    """LANES x LANES floats, rows `source_bytes` apart, to their transpose with rows `target_bytes` apart."""

    def codegen(context, builder, signature, args):
        a = Arguments(("source", "source_bytes", "target", "target_bytes"), args)
        rows = [load(builder, builder.add(a.source, builder.mul(a.source_bytes, I64(i))), VF) for i in range(LANES)]
        kind = ir.VectorType(I32, LANES)
        low = [lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
        high = [lane + LANES // 2 for lane in low]
        for _ in range(LANES.bit_length() - 1):  # perfect shuffles: after log2(LANES) of them rows are columns
            pairs = [(rows[i], rows[i + LANES // 2]) for i in range(LANES // 2)]
            rows = [builder.shuffle_vector(x, y, ir.Constant(kind, lanes)) for x, y in pairs for lanes in (low, high)]
        for i, row in enumerate(rows):
            store(builder, row, builder.add(a.target, builder.mul(a.target_bytes, I64(i))))
        return context.get_dummy_value()

    return _nothing(*([_int] * 4)), codegen


@intrinsic
def matmul(typingctx, a, a_bytes, b, b_bytes, c, c_bytes, rows, columns, inner, add):
    """c [rows, columns] = a [rows, inner] @ b [inner, columns], or += when `add`; strides in bytes, rows of float32.

    rows must be a multiple of TILE_ROWS and columns of PANEL. The order of additions depends on nothing but `inner`.
    """

    def codegen(context, builder, signature, args):
        a = Arguments(("a", "a_bytes", "b", "b_bytes", "c", "c_bytes", "rows", "columns", "inner", "add"), args)
        grown = builder.icmp_signed("!=", a.add, I64(0))
        with cgutils.for_range_slice(builder, I64(0), a.columns, I64(PANEL), I64) as (column, _):
            b_panel, c_panel = (builder.add(base, builder.shl(column, I64(2))) for base in (a.b, a.c))
            with cgutils.for_range_slice(builder, I64(0), a.rows, I64(TILE_ROWS), I64) as (row, _):
                a_rows = [builder.add(a.a, builder.mul(builder.add(row, I64(i)), a.a_bytes)) for i in range(TILE_ROWS)]
                c_rows = [builder.add(c_panel, builder.mul(builder.add(row, I64(i)), a.c_bytes)) for i in range(TILE_ROWS)]
                zero = constant(0.0, VF)
                sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in range(TILE_ROWS)]
                with builder.if_then(grown):
                    for c_row, pair in zip(c_rows, sums, strict=True):
                        for part, total in enumerate(pair):
                            builder.store(load(builder, offset(builder, c_row, 4 * LANES * part), VF), total)
                with cgutils.for_range(builder, a.inner, intp=I64) as k:
                    b_at = builder.add(b_panel, builder.mul(k.index, a.b_bytes))
                    b_parts = [load(builder, offset(builder, b_at, 4 * LANES * part), VF) for part in range(2)]
                    for a_row, pair in zip(a_rows, sums, strict=True):
                        value = splat(builder, load(builder, builder.add(a_row, builder.shl(k.index, I64(2))), F32), VF)
                        for part, total in zip(b_parts, pair, strict=True):
                            builder.store(fma(builder, value, part, builder.load(total)), total)
                for c_row, pair in zip(c_rows, sums, strict=True):
                    for part, total in enumerate(pair):
                        store(builder, builder.load(total), offset(builder, c_row, 4 * LANES * part))
        return context.get_dummy_value()

    return _nothing(*([_int] * 10)), codegen


class Arguments:
    """The LLVM values of an intrinsic by name."""

    def __init__(self, names: tuple[str, ...], values: list[ir.Value]) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value)


def for_each_format(builder: ir.IRBuilder, form: ir.Value, emit: Callable[[int], None], numbers: Iterable[int]) -> None:
    """One branch for each of the formats, chosen by the value `form`."""
    done = builder.append_basic_block("decoded")
    chosen = builder.switch(form, done)
    for number in numbers:
        block = builder.append_basic_block(f"format{number}")
        chosen.add_case(I64(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(done)
    builder.position_at_end(done)
