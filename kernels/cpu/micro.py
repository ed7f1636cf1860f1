"""The inner loops of compiled attention as numba intrinsics: q . k, weights . v, softmax of a row, a small matrix product.

Arguments are plain addresses and strides in bytes, all int64. It does not know where a row's slot number came from.
"""

from __future__ import annotations

from collections.abc import Callable

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
    prefetch,
    splat,
    store,
    summed_each,
)
from kernels.cpu.softmax import CHUNK

TILE_ROWS = 6  # rows that `matmul` works on at a time: with two vectors each they fill the registers of AVX2
PANEL = 2 * LANES  # columns that `matmul` works on at a time
LINE = 64  # bytes

_int, _float, _nothing = types.int64, types.float32, types.void


@intrinsic(prefer_literal=True)
def dot_rows(
    typingctx, group, form, q, dim, codes, row_bytes, scales, scale_bytes, slots, count, out, next_slots, v_codes, v_row_bytes, v_bytes
):
    """out[g, r] = q[g] . row(slots[r]) for `group` query rows [group, dim] float32 and `count` rows, a multiple of 4.

    out is [group, CHUNK]. Rows at next_slots, and theirs of the other store at v_codes, are prefetched on the way.
    """
    heads = group.literal_value
    rows = 2 if heads == 4 and LANES == 8 else 4  # with 16 registers, 16 sums would not fit

    def emit(builder: ir.IRBuilder, form: int, a: _Arguments) -> None:
        with cgutils.for_range_slice(builder, I64(0), a.count, I64(rows), I64) as (r, _):
            slot_at = builder.add(a.slots, builder.shl(r, I64(3)))
            slots = [load(builder, offset(builder, slot_at, 8 * j), I64) for j in range(rows)]
            codes = [builder.add(a.codes, builder.mul(slot, a.row_bytes)) for slot in slots]
            scales = [builder.add(a.scales, builder.mul(slot, a.scale_bytes)) for slot in slots]
            next_at = builder.add(a.next_slots, builder.shl(r, I64(3)))
            for j in range(rows):
                ahead = load(builder, offset(builder, next_at, 8 * j), I64)
                _prefetch_row(builder, builder.add(a.codes, builder.mul(ahead, a.row_bytes)), builder.mul(blocks, I64(block_bytes(form))))
                _prefetch_row(builder, builder.add(a.v_codes, builder.mul(ahead, a.v_row_bytes)), a.v_bytes)
            sums = [[cgutils.alloca_once_value(builder, constant(0.0, VF)) for _ in range(rows)] for _ in range(heads)]
            with cgutils.for_range(builder, blocks, intp=I64) as loop:
                q_at = builder.add(a.q, builder.mul(loop.index, I64(4 * BLOCK)))
                for j in range(rows):
                    code_at = builder.add(codes[j], builder.mul(loop.index, I64(block_bytes(form))))
                    vectors = decoded_block(builder, form, code_at, builder.add(scales[j], builder.shl(loop.index, I64(1))))
                    for part, vector in enumerate(vectors):  # heads innermost: sums and one vector fill the registers of AVX2
                        for g in range(heads):
                            query = load(builder, builder.add(q_at, offset(builder, builder.mul(a.dim, I64(4 * g)), 4 * LANES * part)), VF)
                            builder.store(fma(builder, query, vector, builder.load(sums[g][j])), sums[g][j])
            factors = _row_scales(builder, scales) if form in SCALED_ROWS else constant(1.0, ir.VectorType(F32, rows))
            for g in range(heads):
                scores = builder.fmul(summed_each(builder, [builder.load(total) for total in sums[g]]), factors)
                store(builder, scores, builder.add(offset(builder, a.out, 4 * CHUNK * g), builder.shl(r, I64(2))))

    def codegen(context, builder, signature, args):
        nonlocal blocks
        names = ("form", "q", "dim", "codes", "row_bytes", "scales", "scale_bytes", "slots", "count", "out", "next_slots")
        a = _Arguments((*names, "v_codes", "v_row_bytes", "v_bytes"), args[1:])
        blocks = builder.sdiv(a.dim, I64(BLOCK))
        _for_each_format(builder, a.form, lambda form: emit(builder, form, a))
        return context.get_dummy_value()

    blocks: ir.Value | None = None
    return _nothing(group, *([_int] * 14)), codegen


@intrinsic(prefer_literal=True)
def add_rows(typingctx, group, form, weights, count, codes, row_bytes, scales, scale_bytes, slots, dim, out):
    """out[g] += sum over r of weights[g, r] * row(slots[r]): out [group, dim] float32, weights [group, CHUNK].

    For formats with one scale a row, the weights are multiplied by it first (in place).
    """
    heads = group.literal_value

    def emit(builder: ir.IRBuilder, form: int, a: _Arguments) -> None:
        if form in SCALED_ROWS:
            _scale_weights(builder, heads, a)
        with cgutils.for_range(builder, builder.sdiv(a.dim, I64(BLOCK)), intp=I64) as block:
            code_offset = builder.add(a.codes, builder.mul(block.index, I64(block_bytes(form))))
            scale_offset = builder.add(a.scales, builder.shl(block.index, I64(1)))
            out_at = [
                builder.add(a.out, builder.mul(builder.add(builder.mul(a.dim, I64(g)), builder.mul(block.index, I64(BLOCK))), I64(4)))
                for g in range(heads)
            ]
            every = range(BLOCK // LANES)
            at_once = len(every) if form == FORMATS["float32"] or heads < 3 else 2  # with 16 registers, decoding leaves room for eight sums
            for low in every[::at_once]:
                emit_parts(builder, form, a, code_offset, scale_offset, out_at, every[low : low + at_once])

    def emit_parts(builder, form, a, code_offset, scale_offset, out_at, parts) -> None:
        sums = {
            (g, part): cgutils.alloca_once_value(builder, load(builder, offset(builder, out_at[g], 4 * LANES * part), VF))
            for part in parts
            for g in range(heads)
        }
        with cgutils.for_range(builder, a.count, intp=I64) as row:
            slot = load(builder, builder.add(a.slots, builder.shl(row.index, I64(3))), I64)
            code_at = builder.add(code_offset, builder.mul(slot, a.row_bytes))
            vectors = decoded_block(builder, form, code_at, builder.add(scale_offset, builder.mul(slot, a.scale_bytes)))
            weight_at = builder.add(a.weights, builder.shl(row.index, I64(2)))
            weights = [splat(builder, load(builder, offset(builder, weight_at, 4 * CHUNK * g), F32), VF) for g in range(heads)]
            for (g, part), total in sums.items():
                builder.store(fma(builder, weights[g], vectors[part], builder.load(total)), total)
        for (g, part), total in sums.items():
            store(builder, builder.load(total), offset(builder, out_at[g], 4 * LANES * part))

    def codegen(context, builder, signature, args):
        names = ("form", "weights", "count", "codes", "row_bytes", "scales", "scale_bytes", "slots", "dim", "out")
        a = _Arguments(names, args[1:])
        _for_each_format(builder, a.form, lambda form: emit(builder, form, a))
        return context.get_dummy_value()

    return _nothing(group, *([_int] * 10)), codegen


@intrinsic
def decode_row(typingctx, form, codes, scales, blocks, out):
    """The first 32 * blocks values of a row as float32 at `out`, in the order of its format's blocks; a scale a row is applied."""

    def emit(builder: ir.IRBuilder, form: int, a: _Arguments) -> None:
        with cgutils.for_range(builder, a.blocks, intp=I64) as block:
            code_at = builder.add(a.codes, builder.mul(block.index, I64(block_bytes(form))))
            vectors = decoded_block(builder, form, code_at, builder.add(a.scales, builder.shl(block.index, I64(1))))
            if form in SCALED_ROWS:
                vectors = [builder.fmul(vector, splat(builder, load(builder, a.scales, F32), VF)) for vector in vectors]
            out_at = builder.add(a.out, builder.mul(block.index, I64(4 * BLOCK)))
            for part, vector in enumerate(vectors):
                store(builder, vector, offset(builder, out_at, 4 * LANES * part))

    def codegen(context, builder, signature, args):
        a = _Arguments(("form", "codes", "scales", "blocks", "out"), args)
        _for_each_format(builder, a.form, lambda form: emit(builder, form, a))
        return context.get_dummy_value()

    return _nothing(*([_int] * 5)), codegen


@intrinsic
def transpose(typingctx, source, source_bytes, target, target_bytes):
    """LANES x LANES floats, rows `source_bytes` apart, to their transpose with rows `target_bytes` apart."""

    def codegen(context, builder, signature, args):
        a = _Arguments(("source", "source_bytes", "target", "target_bytes"), args)
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
        a = _Arguments(("a", "a_bytes", "b", "b_bytes", "c", "c_bytes", "rows", "columns", "inner", "add"), args)
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


class _Arguments:
    """The LLVM values of an intrinsic by name."""

    def __init__(self, names: tuple[str, ...], values: list[ir.Value]) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value)


def _for_each_format(builder: ir.IRBuilder, form: ir.Value, emit: Callable[[int], None]) -> None:
    """One branch for each format, chosen by the value `form`."""
    done = builder.append_basic_block("decoded")
    chosen = builder.switch(form, done)
    for number in FORMATS.values():
        block = builder.append_basic_block(f"format{number}")
        chosen.add_case(I64(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(done)
    builder.position_at_end(done)


def _prefetch_row(builder: ir.IRBuilder, address: ir.Value, size: ir.Value) -> None:
    with cgutils.for_range_slice(builder, I64(0), size, I64(LINE), I64) as (at, _):
        prefetch(builder, builder.add(address, at), 3)


def _row_scales(builder: ir.IRBuilder, addresses: list[ir.Value]) -> ir.Value:
    together = ir.Constant(ir.VectorType(F32, len(addresses)), ir.Undefined)
    for j, where in enumerate(addresses):
        together = builder.insert_element(together, load(builder, where, F32), I32(j))
    return together


def _scale_weights(builder: ir.IRBuilder, heads: int, a: _Arguments) -> None:
    with cgutils.for_range(builder, a.count, intp=I64) as row:
        slot = load(builder, builder.add(a.slots, builder.shl(row.index, I64(3))), I64)
        scale = load(builder, builder.add(a.scales, builder.mul(slot, a.scale_bytes)), F32)
        weight_at = builder.add(a.weights, builder.shl(row.index, I64(2)))
        for g in range(heads):
            where = offset(builder, weight_at, 4 * CHUNK * g)
            store(builder, builder.fmul(load(builder, where, F32), scale), where)
