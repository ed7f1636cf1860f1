"""Rows into and out of a store: encode and scatter, decode and gather.

A row here is one head of one token; a program moves a block of them. It does not know which tokens, or whether K was rotated.
"""

import triton
import triton.language as tl

from kernels.gpu.tiles import FP8_TOP, GROUP_VALUES, HALF_TOP, INT8_TOP, divide, load_decoded, narrow, round_even, widen


@triton.jit
def step_codes(values, steps):
    """Integer codes of `values` in units of `steps`, ties to even; a step of 0 codes everything as 0."""
    zero = steps == 0
    return tl.where(zero, 0.0, round_even(divide(values, tl.where(zero, 1.0, steps).broadcast_to(values.shape))))


@triton.jit
def as_half(x):
    """x as float16, held to the largest finite one. Through float32 for float64 x, as the reference rounds."""
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -HALF_TOP), HALF_TOP)).to(tl.float32).to(tl.float16)


@triton.jit
def or_nan(groups, found):
    """`found` [R, S] of groups [R, S, WIDTH], or NaN where a group holds one: a GPU's maximum passes over NaN."""
    sick = tl.max((groups != groups).to(tl.int32), axis=2) > 0
    return tl.where(sick, float("nan"), found)


@triton.jit
def first_largest(groups, WIDTH: tl.constexpr):
    """The signed value of largest magnitude of each group [R, S, WIDTH] -> [R, S, 1]; of equals, the first."""
    size = tl.abs(groups)
    lane = tl.arange(0, WIDTH)[None, None, :]
    at = tl.min(tl.where(size == tl.max(size, axis=2)[:, :, None], lane, WIDTH), axis=2)
    return or_nan(groups, tl.sum(tl.where(lane == at[:, :, None], groups, 0.0), axis=2))[:, :, None]


@triton.jit
def fp8_codes(x):
    """Bits of x as e4m3fn, ties to even, clamped to 448. Built by hand: with the exponent at e, a code is 8 e + |x| / 2^(e - 9)."""
    x = x.to(tl.float32)
    size = tl.minimum(tl.abs(x), FP8_TOP)
    exponent = tl.maximum((size.to(tl.uint32, bitcast=True) >> 23).to(tl.int32) - 127, -6)  # e4m3fn has no normal number below 2^-6
    step = ((exponent - 3 + 127) << 23).to(tl.uint32).to(tl.float32, bitcast=True)
    steps = round_even(size / step)  # step is a power of two, so this division is exact
    code = (exponent + 6) * 8 + tl.where(x != x, 0.0, steps).to(tl.int32)
    sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32) * 128
    return (tl.where(x != x, 127, code) + sign).to(tl.uint8)


@triton.jit(do_not_specialize=["count", "heads", "pitch"])
def write_kernel(
    rows,  # [T, pitch, D]; the heads to write are the first of each token's pitch
    slots,  # [T] int64
    codes,  # [N, heads, codes of one head]
    scales,  # [N, heads, scales of one head] or None
    count,  # T * heads
    heads,
    pitch,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CODEC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = tl.arange(0, BLOCK_D)
    live = row < count
    kept = live[:, None] & (lane < D)[None, :]
    token = row // heads
    head = row % heads
    loaded = tl.load(rows + (token * pitch + head)[:, None] * D + lane[None, :], mask=kept, other=0.0)
    target = tl.load(slots + token, mask=live, other=0).to(tl.int64) * heads + head  # [BLOCK_R] rows of the store
    flat = codes + target[:, None] * D + lane[None, :]

    if CODEC == "raw":
        tl.store(flat, loaded, mask=kept)
    elif CODEC == "fp8":
        tl.store(flat, fp8_codes(widen(loaded)), mask=kept)
    elif CODEC == "int8":
        x = widen(loaded)
        amax = tl.max(tl.abs(x), axis=1)
        amax = tl.where(tl.max((x != x).to(tl.int32), axis=1) > 0, float("nan"), amax)
        step = divide(amax, tl.full([BLOCK_R], INT8_TOP, x.dtype)).to(tl.float32)
        code = step_codes(x, step.to(x.dtype)[:, None])
        tl.store(flat, tl.minimum(tl.maximum(code, -INT8_TOP), INT8_TOP).to(tl.int8), mask=kept)
        tl.store(scales + target, step, mask=live)
    else:
        WIDTH: tl.constexpr = min(GROUP_VALUES, BLOCK_D)
        GROUPS: tl.constexpr = BLOCK_D // WIDTH
        PER_ROW: tl.constexpr = (D + GROUP_VALUES - 1) // GROUP_VALUES
        x = tl.reshape(widen(loaded), [BLOCK_R, GROUPS, WIDTH])  # lanes past D are zeros: they change neither amax nor a kept code
        if CODEC == "q8_0":
            step = as_half(divide(or_nan(x, tl.max(tl.abs(x), axis=2)), tl.full([BLOCK_R, GROUPS], INT8_TOP, x.dtype)))[:, :, None]
            code = tl.reshape(step_codes(x, step.to(x.dtype)), [BLOCK_R, BLOCK_D])
            tl.store(flat, tl.minimum(tl.maximum(code, -INT8_TOP), INT8_TOP).to(tl.int8), mask=kept)
        else:
            step = as_half(first_largest(x, WIDTH) * -0.125)
            code = tl.reshape(step_codes(x, step.to(x.dtype)), [BLOCK_R, BLOCK_D])
            nibble = tl.where(kept, tl.minimum(tl.maximum(code + 8.0, 0.0), 15.0), 0.0).to(tl.uint8)
            low, high = tl.split(tl.reshape(nibble, [BLOCK_R, BLOCK_D // 2, 2]))
            BYTES: tl.constexpr = (D + 1) // 2
            byte = tl.arange(0, BLOCK_D // 2)
            packed = codes + target[:, None] * BYTES + byte[None, :]
            tl.store(packed, low | (high << 4), mask=live[:, None] & (byte < BYTES)[None, :])
        group = tl.arange(0, GROUPS)
        addresses = scales + target[:, None] * PER_ROW + group[None, :]
        tl.store(addresses, tl.reshape(step, [BLOCK_R, GROUPS]), mask=live[:, None] & (group < PER_ROW)[None, :])


@triton.jit(do_not_specialize=["count", "heads"])
def read_kernel(
    codes,
    scales,
    slots,  # [n] int64
    out,  # [n, heads, D]
    count,  # n * heads
    heads,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CODEC: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if DTYPE.is_fp64() else tl.float32
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = tl.arange(0, BLOCK_D)
    live = row < count
    source = tl.load(slots + row // heads, mask=live, other=0).to(tl.int64) * heads + row % heads
    values = load_decoded(codes, scales, source, live, CODEC, D, BLOCK_D, WIDE)
    tl.store(out + row[:, None] * D + lane[None, :], narrow(values, DTYPE), mask=live[:, None] & (lane < D)[None, :])
