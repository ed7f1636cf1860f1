"""The pieces every kernel is made of: rounding, dots, masks, decoding a tile of stored rows, and the online softmax update.

Tiles of numbers in, tiles of numbers out: nothing here knows where rows live or which span is being served.

Two facts shape this file. Compiled, `tl.dot` wants at least 16 rows, columns and inner lanes. Interpreted, bfloat16 is
carried as bits: dots and arithmetic on it are wrong and casts to it cut off instead of rounding, so under the interpreter
bfloat16 is widened before every use and rounded by hand (`INTERPRETED`).
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
GROUP_VALUES = tl.constexpr(32)  # values that share a scale in q8_0 and q4_0
INT8_TOP = tl.constexpr(127.0)
FP8_TOP = tl.constexpr(448.0)
HALF_TOP = tl.constexpr(65504.0)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def widen(x):
    """x in the dtype that arithmetic runs in: float64 stays, everything else becomes float32."""
    if x.dtype.is_fp64():
        return x
    if INTERPRETED and x.dtype.is_bf16():
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """x rounded to DTYPE, ties to even."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def as_operand(x, DTYPE: tl.constexpr):
    """x rounded to DTYPE, in the form that `dot` takes."""
    if INTERPRETED and DTYPE.is_bf16():
        return widen(narrow(x, DTYPE))
    return narrow(x, DTYPE)


@triton.jit
def dot(a, b, total):
    """total + a @ b; float32 operands are never shortened to TF32."""
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def divide(a, b):
    """a / b rounded once: the plain operator may compile to an approximate division."""
    if a.dtype.is_fp64():
        return a / b
    return tl.div_rn(a, b)


@triton.jit
def round_even(x):
    """x to the nearest integer, ties to even, for |x| below 2^22; larger magnitudes stay large."""
    if x.dtype.is_fp64():
        return (x + 6755399441055744.0) - 6755399441055744.0  # 1.5 * 2^52: the sum has no bits left for a fraction
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def logistic(x):
    """1 / (1 + exp(-x)) without overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def tanh(x):
    """tanh(x): Lambert's continued fraction near zero, where the exponential form would lose the leading digits."""
    z = tl.minimum(x * x, 1.0)
    near = x * (135135.0 + z * (17325.0 + z * (378.0 + z))) / (135135.0 + z * (62370.0 + z * (3150.0 + z * 28.0)))
    small = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - small) / (1.0 + small)
    return tl.where(tl.abs(x) < 0.5, near, tl.where(x < 0, -far, far))


@triton.jit
def load_row_scales(scales, rows, live):
    """The one scale of each int8 row -> [N]; rows that are not live read as 0."""
    return tl.load(scales + rows, mask=live, other=0.0)


@triton.jit
def load_codes(codes, rows, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Codes of one value each, [N, BLOCK_D] as stored; lanes from D on and rows that are not live read as 0."""
    lane = tl.arange(0, BLOCK_D)
    addresses = codes + rows[:, None] * D + lane[None, :]
    if D == BLOCK_D:
        return tl.load(addresses, mask=live[:, None], other=0.0)
    return tl.load(addresses, mask=live[:, None] & (lane < D)[None, :], other=0.0)


@triton.jit
def load_nibbles(codes, rows, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """q4_0 codes -> [N, BLOCK_D] float32 in [-8, 7]; a byte holds an even lane in its low half and the next in its high half."""
    BYTES: tl.constexpr = (D + 1) // 2
    HALF: tl.constexpr = BLOCK_D // 2
    lane = tl.arange(0, HALF)
    addresses = codes + rows[:, None] * BYTES + lane[None, :]
    if BYTES == HALF:
        pairs = tl.load(addresses, mask=live[:, None], other=0)
    else:
        pairs = tl.load(addresses, mask=live[:, None] & (lane < BYTES)[None, :], other=0)
    return tl.interleave((pairs & 15).to(tl.float32), (pairs >> 4).to(tl.float32)) - 8.0


@triton.jit
def scale_groups(values, scales, rows, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """values [N, BLOCK_D] times the stored scale of each group of 32 lanes."""
    N: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = min(GROUP_VALUES, BLOCK_D)
    PER_ROW: tl.constexpr = (D + GROUP_VALUES - 1) // GROUP_VALUES
    GROUPS: tl.constexpr = BLOCK_D // WIDTH
    group = tl.arange(0, GROUPS)
    addresses = scales + rows[:, None] * PER_ROW + group[None, :]
    steps = tl.load(addresses, mask=live[:, None] & (group < PER_ROW)[None, :], other=0.0).to(values.dtype)
    return tl.reshape(tl.reshape(values, [N, GROUPS, WIDTH]) * steps[:, :, None], [N, BLOCK_D])


@triton.jit
def load_decoded(codes, scales, rows, live, CODEC: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Decoded rows -> [N, BLOCK_D] in WIDE, with no rounding added beyond WIDE's own; dead rows and lanes are 0."""
    if CODEC == "q4_0":
        return scale_groups(load_nibbles(codes, rows, live, D, BLOCK_D).to(WIDE), scales, rows, live, D, BLOCK_D)
    loaded = load_codes(codes, rows, live, D, BLOCK_D)
    if CODEC == "raw":
        return widen(loaded)
    values = loaded.to(tl.float32).to(WIDE)
    if CODEC == "int8":
        return values * load_row_scales(scales, rows, live).to(WIDE)[:, None]
    if CODEC == "q8_0":
        return scale_groups(values, scales, rows, live, D, BLOCK_D)
    return values


@triton.jit
def load_operand(
    codes, scales, rows, live, CODEC: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr
):
    """Decoded rows as a dot operand [N, BLOCK_D]: raw and fp8 exactly, the scaled codecs rounded once to DTYPE."""
    if CODEC == "raw":
        loaded = load_codes(codes, rows, live, D, BLOCK_D)
        return widen(loaded) if INTERPRETED and DTYPE.is_bf16() else loaded
    values = load_decoded(codes, scales, rows, live, CODEC, D, BLOCK_D, WIDE)
    if DTYPE.is_fp16():
        values = tl.minimum(tl.maximum(values, -HALF_TOP), HALF_TOP)  # code * scale may round past the largest float16
    return as_operand(values, DTYPE)


@triton.jit
def seen_by(query, key, window, sinks, WINDOWED: tl.constexpr):
    """[M, N] bool: query position i sees key position j when j <= i and (i - j < window or j < sinks)."""
    i = query[:, None]
    j = key[None, :]
    seen = j <= i
    if WINDOWED:
        seen = seen & ((i - j < window) | (j < sinks))
    return seen


@triton.jit
def softmax_step(scores, top, total):
    """One tile of base-2 scores [M, N] (-inf where unseen) into the running maximum and sum [M].

    -> weights [M, N], the factor that rescales what was accumulated before [M], new top, new total. A row that has seen
    nothing keeps top = -inf and is anchored at 0, so that no infinity is subtracted from another.
    Online softmax: Milakov & Gimelshein 2018.
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - anchor[:, None])
    rescale = tl.exp2(top - anchor)
    return weights, rescale, new_top, total * rescale + tl.sum(weights, axis=1)
