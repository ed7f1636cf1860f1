"""The ops between the matrix products: rotary embedding, RMS norm with residual, gated activation. Rows in, rows out."""

import triton
import triton.language as tl

from kernels.gpu.tiles import logistic, narrow, widen


@triton.jit(do_not_specialize=["count", "heads", "head_dim", "rotated", "token_stride", "head_stride"])
def rope_kernel(
    x,  # [T, heads, head_dim] with the strides given, unit stride over head_dim
    cos,  # [T, rotated] float32
    sin,
    out,  # [T, heads, head_dim]
    count,  # T * heads
    heads,
    head_dim,
    rotated,  # pairs: lane i turns with lane rotated + i, lanes from 2 * rotated on stay as they are
    token_stride,
    head_stride,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = (row < count)[:, None]
    pair = tl.arange(0, BLOCK_D // 2)[None, :]
    token = row // heads
    source = x + (token * token_stride + row % heads * head_stride)[:, None]
    target = out + row[:, None] * head_dim
    angle = token[:, None] * rotated + pair
    kept = live & (pair < rotated)
    first = widen(tl.load(source + pair, mask=kept, other=0.0))
    second = widen(tl.load(source + rotated + pair, mask=kept, other=0.0))
    c = tl.load(cos + angle, mask=kept, other=0.0).to(first.dtype)
    s = tl.load(sin + angle, mask=kept, other=0.0).to(first.dtype)
    tl.store(target + pair, narrow(first * c - second * s, DTYPE), mask=kept)
    tl.store(target + rotated + pair, narrow(second * c + first * s, DTYPE), mask=kept)
    if 2 * rotated < head_dim:
        lane = tl.arange(0, BLOCK_D)[None, :]
        rest = live & (lane >= 2 * rotated) & (lane < head_dim)
        tl.store(target + lane, tl.load(source + lane, mask=rest, other=0.0), mask=rest)


@triton.jit(do_not_specialize=["rows", "features", "inner", "outer_stride", "inner_stride"])
def rms_norm_kernel(
    x,  # row r is at (r // inner) * outer_stride + (r % inner) * inner_stride
    residual,  # [rows, features] or None
    weight,  # [features]
    out,  # [rows, features]
    total,  # [rows, features] or None: x + residual
    rows,
    features,
    inner,
    outer_stride,
    inner_stride,
    eps,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = tl.arange(0, BLOCK_F)
    kept = (row < rows)[:, None] & (lane < features)[None, :]
    source = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    target = row.to(tl.int64)[:, None] * features + lane[None, :]
    wide = widen(tl.load(x + source[:, None] + lane[None, :], mask=kept, other=0.0))
    if residual is not None:
        summed = narrow(wide + widen(tl.load(residual + target, mask=kept, other=0.0)), DTYPE)
        tl.store(total + target, summed, mask=kept)
        wide = widen(summed)  # the norm is of the sum as stored
    mean = tl.sum(wide * wide, axis=1) / features
    scale = 1.0 / tl.sqrt(mean + eps)
    gain = widen(tl.load(weight + lane, mask=lane < features, other=0.0))
    tl.store(out + target, narrow(wide * scale[:, None] * gain.to(wide.dtype)[None, :], DTYPE), mask=kept)


@triton.jit(do_not_specialize=["features", "token_stride"])
def gated_kernel(
    gate_up,  # [T, 2 * features], gate first, unit stride over features
    out,  # [T, features]
    features,
    token_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = lane < features
    source = gate_up + token * token_stride + lane
    gate = widen(tl.load(source, mask=kept, other=0.0))
    up = widen(tl.load(source + features, mask=kept, other=0.0))
    if ACTIVATION == "silu":
        act = gate * logistic(gate)
    else:  # tanh form of GELU: (1 + tanh(y)) / 2 is the logistic of 2 y
        act = gate * logistic(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + token * features + lane, narrow(act * up, out.dtype.element_ty), mask=kept)
