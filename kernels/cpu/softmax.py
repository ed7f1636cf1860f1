"""The softmax of a row of scores as numba intrinsics: its maximum, its exponentials and their sum, and the rescaling of what came before.

Arguments are plain addresses, int64. It does not know whose scores they are.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.emit import I32, I64, LANES, VF, constant, exp_below, load, offset, splat, store, summed

CHUNK = 64  # keys whose scores are in flight; rows of scores are this long

_int, _float, _nothing = types.int64, types.float32, types.void


@intrinsic
def scaled_max(typingctx, scores, scale):
    """Multiply CHUNK scores by `scale` in place; their maximum. -inf only if all are."""

    def codegen(context, builder, signature, args):
        address, scale = args
        factor, top = splat(builder, scale, VF), constant(float("-inf"), VF)
        for part in range(CHUNK // LANES):
            where = offset(builder, address, 4 * LANES * part)
            values = builder.fmul(load(builder, where, VF), factor)
            store(builder, values, where)
            top = builder.select(builder.fcmp_unordered(">", values, top), values, top)
        lanes = [builder.extract_element(top, I32(lane)) for lane in range(LANES)]
        most = lanes[0]
        for lane in lanes[1:]:
            most = builder.select(builder.fcmp_unordered(">", lane, most), lane, most)
        return most

    return _float(_int, _float), codegen


@intrinsic
def exp_sum(typingctx, scores, top):
    """exp(score - top) of CHUNK scores in place; their sum."""

    def codegen(context, builder, signature, args):
        address, top = args
        shift, total = splat(builder, top, VF), constant(0.0, VF)
        for part in range(CHUNK // LANES):
            where = offset(builder, address, 4 * LANES * part)
            weights = exp_below(builder, builder.fsub(load(builder, where, VF), shift))
            store(builder, weights, where)
            total = builder.fadd(total, weights)
        return summed(builder, total)

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
