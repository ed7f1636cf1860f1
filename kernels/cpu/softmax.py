"""The softmax of a row of scores as numba intrinsics: its maximum, its exponentials and their sum, and the rescaling of what came before.

Arguments are plain addresses, int64. It does not know whose scores they are.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.emit import F32, I32, I64, LANES, VF, constant, exp_below, halves, load, offset, splat, store, summed

CHUNK = 64  # keys whose scores are in flight; rows of scores are this long

_int, _float, _nothing = types.int64, types.float32, types.void


@intrinsic(prefer_literal=True)
def weigh(typingctx, group, scores, scale, tops, totals, kept):
    """Softmax weights of one more CHUNK of keys, for `group` rows of scores [group, CHUNK], in place: exp(scale * score - top).

    tops and totals [group] are a row's maximum and total weight so far, brought up to date; kept [group] is what the sums so far
    are still worth. A row needs one score above -inf, here or before.
    """
    heads = group.literal_value

    def codegen(context, builder, signature, args):
        _, scores, scale, tops, totals, kept = args
        factor = splat(builder, scale, VF)
        for g in range(heads):
            places = _places(builder, offset(builder, scores, 4 * CHUNK * g))
            values = [builder.fmul(load(builder, where, VF), factor) for where in places]
            old = load(builder, offset(builder, tops, 4 * g), F32)
            most = _largest(builder, values)
            top = builder.select(builder.fcmp_ordered(">", old, most), old, most)
            store(builder, top, offset(builder, tops, 4 * g))
            worth = builder.extract_element(exp_below(builder, splat(builder, builder.fsub(old, top), VF)), I32(0))
            store(builder, worth, offset(builder, kept, 4 * g))
            total_at = offset(builder, totals, 4 * g)
            before = builder.fmul(load(builder, total_at, F32), worth)
            store(builder, builder.fadd(before, _exp_total(builder, places, values, top)), total_at)
        return context.get_dummy_value()

    return _nothing(group, _int, _float, _int, _int, _int), codegen


def _places(builder, address):
    """The addresses of the vectors of CHUNK floats."""
    return [offset(builder, address, 4 * first) for first in range(0, CHUNK, LANES)]


def _exp_total(builder, places, values, top):
    """exp(value - top) stored at `places`; the sum of all."""
    shift, total = splat(builder, top, VF), constant(0.0, VF)
    for where, value in zip(places, values, strict=True):
        weights = exp_below(builder, builder.fsub(value, shift))
        store(builder, weights, where)
        total = builder.fadd(total, weights)
    return summed(builder, total)


def _largest(builder, vectors):
    """The largest lane of some vectors; NaN may be passed over: the weights show it."""

    def larger(a, b):
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    while len(vectors) > 1:
        vectors = [larger(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    (vector,) = vectors
    while vector.type.count > 1:
        vector = larger(*halves(builder, vector))
    return builder.extract_element(vector, I32(0))


@intrinsic
def scaled_max(typingctx, scores, scale):
    """Multiply CHUNK scores by `scale` in place; their maximum. -inf only if all are."""

    def codegen(context, builder, signature, args):
        address, scale = args
        factor = splat(builder, scale, VF)
        places = _places(builder, address)
        values = [builder.fmul(load(builder, where, VF), factor) for where in places]
        for where, value in zip(places, values, strict=True):
            store(builder, value, where)
        return _largest(builder, values)

    return _float(_int, _float), codegen


@intrinsic
def exp_sum(typingctx, scores, top):
    """exp(score - top) of CHUNK scores in place; their sum."""

    def codegen(context, builder, signature, args):
        address, top = args
        places = _places(builder, address)
        return _exp_total(builder, places, [load(builder, where, VF) for where in places], top)

    return _float(_int, _float), codegen


@intrinsic
def scale_row(typingctx, row, count, factor):
    """Multiply `count` floats (a multiple of LANES) by `factor`, in place."""

    def codegen(context, builder, signature, args):
        address, count, factor = args
        factor = splat(builder, factor, VF)
        with cgutils.for_range_slice(builder, I64(0), count, I64(LANES), I64) as (i, _):
            where = builder.add(address, builder.shl(i, I64(2)))
            store(builder, builder.fmul(load(builder, where, VF), factor), where)
        return context.get_dummy_value()

    return _nothing(_int, _int, _float), codegen
