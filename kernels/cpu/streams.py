"""What one query token does to rows where they lie, as numba intrinsics: q . k of some rows, and weights . v.

Arguments are plain addresses and strides in bytes, all int64. It does not know where a row's slot number came from.
"""

from __future__ import annotations

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
    SCALED_BLOCKS,
    SCALED_ROWS,
    VF,
    block_bytes,
    block_scale,
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
from kernels.cpu.micro import Arguments, for_each_format
from kernels.cpu.narrow import VB, dot, host_multiplies_bfloat16, narrow_block
from kernels.cpu.softmax import CHUNK

LINE = 64  # bytes
NARROW = 16  # added to a format: the query rows are bfloat16 too, and the host multiplies them itself
# The formats whose values bfloat16 holds exactly, so that nothing is lost.
NARROW_FORMATS = [number for name, number in FORMATS.items() if name not in ("float32", "float16")]
HOST_IS_NARROW = host_multiplies_bfloat16()

_int, _nothing = types.int64, types.void


@intrinsic(prefer_literal=True)
def dot_rows(
    typingctx, group, form, q, dim, heads, parts, codes, row_bytes, head_bytes, scales, scale_bytes, scale_head_bytes, slots, count, out,
    next_slots, k_bytes, v_codes, v_row_bytes, v_bytes
):  # fmt: skip
    """out[h, p, g, r] = q[h, p, g] . row(slots[r])[h] for `heads` heads of a row, `parts` of `group` query rows each, and `count` rows.

    q is float32, or bfloat16 where NARROW was added to `form`; [heads, parts, group, dim]. out is float32 [heads, parts, group, CHUNK].
    count is a multiple of 4. With each head, k_bytes of the rows at next_slots and v_bytes of theirs in the other store are prefetched.
    """
    shared = group.literal_value
    rows = 2 if shared == 4 and LANES == 8 else 4  # with 16 registers, 16 sums would not fit

    def emit(builder: ir.IRBuilder, form: int, narrow: bool, a: Arguments) -> None:
        q_bytes = builder.mul(a.dim, I64(2 if narrow else 4))
        with cgutils.for_range_slice(builder, I64(0), a.count, I64(rows), I64) as (r, _):
            slots, following = (
                [load(builder, offset(builder, builder.add(base, builder.shl(r, I64(3))), 8 * j), I64) for j in range(rows)]
                for base in (a.slots, a.next_slots)
            )
            ahead = [
                (builder.add(a.codes, builder.mul(slot, a.row_bytes)), builder.add(a.v_codes, builder.mul(slot, a.v_row_bytes)))
                for slot in following
            ]
            codes = [builder.add(a.codes, builder.mul(slot, a.row_bytes)) for slot in slots]
            scales = [builder.add(a.scales, builder.mul(slot, a.scale_bytes)) for slot in slots]
            with cgutils.for_range(builder, a.heads, intp=I64) as head:
                head_codes = [builder.add(code, builder.mul(head.index, a.head_bytes)) for code in codes]
                head_scales = [builder.add(scale, builder.mul(head.index, a.scale_head_bytes)) for scale in scales]
                factors = _row_scales(builder, head_scales) if form in SCALED_ROWS else None
                for k_next, v_next in ahead:  # a share with each head: more at once would wait for each other
                    _prefetch(builder, builder.add(k_next, builder.mul(head.index, a.k_bytes)), a.k_bytes)
                    _prefetch(builder, builder.add(v_next, builder.mul(head.index, a.v_bytes)), a.v_bytes)
                with cgutils.for_range(builder, a.parts, intp=I64) as part:
                    first = builder.mul(builder.add(builder.mul(head.index, a.parts), part.index), I64(shared))
                    q_at = [builder.add(a.q, builder.mul(builder.add(first, I64(g)), q_bytes)) for g in range(shared)]
                    target = builder.add(a.out, builder.add(builder.mul(first, I64(4 * CHUNK)), builder.shl(r, I64(2))))
                    for g, found in enumerate(scored(builder, form, narrow, a.blocks, q_at, head_codes, head_scales)):
                        store(builder, found if factors is None else builder.fmul(found, factors), offset(builder, target, 4 * CHUNK * g))

    def scored(builder: ir.IRBuilder, form: int, narrow: bool, blocks: ir.Value, q_at: list, codes: list, scales: list) -> list[ir.Value]:
        """For each query row its products with these rows, one short vector."""
        sums = [[cgutils.alloca_once_value(builder, constant(0.0, VF)) for _ in range(rows)] for _ in q_at]
        with cgutils.for_range(builder, blocks, intp=I64) as block:
            q_block = [builder.add(at, builder.mul(block.index, I64((2 if narrow else 4) * BLOCK))) for at in q_at]
            for j in range(rows):
                code_at = builder.add(codes[j], builder.mul(block.index, I64(block_bytes(form))))
                scale_at = builder.add(scales[j], builder.shl(block.index, I64(1)))
                (_add_narrow if narrow else _add_wide)(builder, form, q_block, code_at, scale_at, [each[j] for each in sums])
        return [summed_each(builder, [builder.load(total) for total in each]) for each in sums]

    def codegen(context, builder, signature, args):
        names = ("form", "q", "dim", "heads", "parts", "codes", "row_bytes", "head_bytes", "scales", "scale_bytes", "scale_head_bytes")
        a = Arguments((*names, "slots", "count", "out", "next_slots", "k_bytes", "v_codes", "v_row_bytes", "v_bytes"), args[1:])
        a.blocks = builder.sdiv(a.dim, I64(BLOCK))
        numbers = [*FORMATS.values(), *(NARROW + form for form in NARROW_FORMATS if HOST_IS_NARROW)]
        for_each_format(builder, a.form, lambda form: emit(builder, form % NARROW, form >= NARROW, a), numbers)
        return context.get_dummy_value()

    return _nothing(group, *([_int] * 19)), codegen


def _add_wide(builder: ir.IRBuilder, form: int, q_at: list[ir.Value], code_at: ir.Value, scale_at: ir.Value, sums: list) -> None:
    vectors = decoded_block(builder, form, code_at, scale_at)
    for part, vector in enumerate(vectors):  # heads innermost: sums and one vector fill the registers of AVX2
        for query_at, total in zip(q_at, sums, strict=True):
            query = load(builder, offset(builder, query_at, 4 * LANES * part), VF)
            builder.store(fma(builder, query, vector, builder.load(total)), total)


def _add_narrow(builder: ir.IRBuilder, form: int, q_at: list[ir.Value], code_at: ir.Value, scale_at: ir.Value, sums: list) -> None:
    values = narrow_block(builder, form, code_at)
    scale = block_scale(builder, scale_at) if form in SCALED_BLOCKS else None
    for query_at, total in zip(q_at, sums, strict=True):
        query, before = load(builder, query_at, VB), builder.load(total)
        after = (
            dot(builder, query, values, before)
            if scale is None
            else fma(builder, dot(builder, query, values, constant(0.0, VF)), scale, before)
        )
        builder.store(after, total)


@intrinsic(prefer_literal=True)
def add_rows(typingctx, group, form, weights, count, codes, row_bytes, scales, scale_bytes, slots, dim, out, kept):
    """out[g] = kept[g] * out[g] + sum over r of weights[g, r] * row(slots[r]): out [group, dim] float32, weights [group, CHUNK].

    For formats with one scale a row, the weights are multiplied by it first (in place), those of all CHUNK slots.
    """
    heads = group.literal_value

    def emit(builder: ir.IRBuilder, form: int, a: Arguments) -> None:
        if form in SCALED_ROWS:
            _scale_weights(builder, heads, a)
        if LANES == 16:  # a pass over the rows takes two blocks: 16 sums leave registers for what is decoded
            pairs = builder.sdiv(a.blocks, I64(2))
            with cgutils.for_range(builder, pairs, intp=I64) as pair:
                emit_blocks(builder, form, a, builder.shl(pair.index, I64(1)), 2, range(2))
            with builder.if_then(builder.icmp_signed("!=", builder.shl(pairs, I64(1)), a.blocks)):
                emit_blocks(builder, form, a, builder.shl(pairs, I64(1)), 1, range(2))
            return
        every = range(BLOCK // LANES)
        at_once = len(every) if form == FORMATS["float32"] or heads < 3 else 2  # with 16 registers, decoding leaves room for eight sums
        with cgutils.for_range(builder, a.blocks, intp=I64) as block:
            for low in every[::at_once]:
                emit_blocks(builder, form, a, block.index, 1, every[low : low + at_once])

    def emit_blocks(builder, form, a, first, count, parts) -> None:
        """Blocks first.. of all rows; of each, these vectors."""
        numbers = [builder.add(first, I64(i)) for i in range(count)]
        code_at = [builder.add(a.codes, builder.mul(number, I64(block_bytes(form)))) for number in numbers]
        scale_at = [builder.add(a.scales, builder.shl(number, I64(1))) for number in numbers]
        targets = {
            (g, i, part): offset(
                builder,
                builder.add(a.out, builder.shl(builder.add(builder.mul(a.dim, I64(g)), builder.mul(numbers[i], I64(BLOCK))), I64(2))),
                4 * LANES * part,
            )
            for g in range(heads)
            for i in range(count)
            for part in parts
        }
        kept = [splat(builder, load(builder, offset(builder, a.kept, 4 * g), F32), VF) for g in range(heads)]
        sums = {}
        for key, target in targets.items():
            sums[key] = cgutils.alloca_once(builder, VF)
            builder.store(builder.fmul(load(builder, target, VF), kept[key[0]]), sums[key])
        with cgutils.for_range(builder, a.count, intp=I64) as row:
            slot = load(builder, builder.add(a.slots, builder.shl(row.index, I64(3))), I64)
            codes_step, scales_step = builder.mul(slot, a.row_bytes), builder.mul(slot, a.scale_bytes)
            weight_at = builder.add(a.weights, builder.shl(row.index, I64(2)))
            weights = [splat(builder, load(builder, offset(builder, weight_at, 4 * CHUNK * g), F32), VF) for g in range(heads)]
            for i in range(count):
                vectors = decoded_block(builder, form, builder.add(code_at[i], codes_step), builder.add(scale_at[i], scales_step))
                for part in parts:
                    for g in range(heads):
                        total = sums[g, i, part]
                        builder.store(fma(builder, weights[g], vectors[part], builder.load(total)), total)
        for key, target in targets.items():
            store(builder, builder.load(sums[key]), target)

    def codegen(context, builder, signature, args):
        names = ("form", "weights", "count", "codes", "row_bytes", "scales", "scale_bytes", "slots", "dim", "out", "kept")
        a = Arguments(names, args[1:])
        a.blocks = builder.sdiv(a.dim, I64(BLOCK))
        for_each_format(builder, a.form, lambda form: emit(builder, form, a), FORMATS.values())
        return context.get_dummy_value()

    return _nothing(group, *([_int] * 11)), codegen


def _prefetch(builder: ir.IRBuilder, address: ir.Value, size: ir.Value) -> None:
    """Into the second-level cache: a chunk of rows is more than the first level holds."""
    with cgutils.for_range_slice(builder, I64(0), size, I64(2 * LINE), I64) as (at, _):
        for part in range(2):
            prefetch(builder, offset(builder, builder.add(address, at), part * LINE), 2)


def _row_scales(builder: ir.IRBuilder, addresses: list[ir.Value]) -> ir.Value:
    together = ir.Constant(ir.VectorType(F32, len(addresses)), ir.Undefined)
    for j, where in enumerate(addresses):
        together = builder.insert_element(together, load(builder, where, F32), I32(j))
    return together


def _scale_weights(builder: ir.IRBuilder, heads: int, a: Arguments) -> None:
    with cgutils.for_range_slice(builder, I64(0), I64(CHUNK), I64(LANES), I64) as (first, _):
        slot_at = builder.add(a.slots, builder.shl(first, I64(3)))
        slots = [load(builder, offset(builder, slot_at, 8 * j), I64) for j in range(LANES)]
        scales = _row_scales(builder, [builder.add(a.scales, builder.mul(slot, a.scale_bytes)) for slot in slots])
        weight_at = builder.add(a.weights, builder.shl(first, I64(2)))
        for g in range(heads):
            where = offset(builder, weight_at, 4 * CHUNK * g)
            store(builder, builder.fmul(load(builder, where, VF), scales), where)
