"""Launching the ops between the matrix products. Shapes come from `kernels.api`, already checked."""

from __future__ import annotations

import torch

from kernels.gpu.launch import FP_FUSION, ceil_div, dtype_name, require_listed
from kernels.gpu.pointwise import gated_kernel, rms_norm_kernel, rope_kernel
from kernels.gpu.specialisations import Pointwise, block_dim, power_of_two

ROPE_VALUES = 1024
NORM_VALUES = 2048  # values that one program of rms_norm handles, when a row is shorter than that
GATED_BLOCK = 1024
SMALLEST_BLOCK = 64


def rope_rows(block: int) -> int:
    """Rows (one head of one token) that one program of rope handles."""
    return max(1, ROPE_VALUES // block)


def norm_rows(block: int) -> int:
    """Rows that one program of rms_norm handles."""
    return max(1, NORM_VALUES // block)


def norm_warps(block: int) -> int:
    """Warps of one program of rms_norm: with four, rows of 2,048 and their residual do not fit the registers of sm_90."""
    return 4 if block < 2048 else 8


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    tokens, heads, head_dim = x.shape
    block = block_dim(head_dim)
    require_listed(Pointwise("rope", dtype_name(x.dtype), block), x.device)
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(tokens, heads, head_dim, dtype=x.dtype, device=x.device)
    some = rope_rows(block)
    rope_kernel[(ceil_div(tokens * heads, some),)](
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        tokens * heads,
        heads,
        head_dim,
        cos.shape[1],
        x.stride(0),
        x.stride(1),
        BLOCK_D=block,
        BLOCK_R=some,
        num_warps=4,
        enable_fp_fusion=FP_FUSION,
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    features = x.shape[-1]
    block = max(SMALLEST_BLOCK, power_of_two(features))
    op = "rms_norm" if residual is None else "rms_norm residual"
    require_listed(Pointwise(op, dtype_name(x.dtype), block), x.device)
    rows, inner, outer_stride, inner_stride, x = _strided_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    some = norm_rows(block)
    rms_norm_kernel[(ceil_div(rows, some),)](
        x,
        None if residual is None else residual.contiguous(),
        weight.contiguous(),
        out,
        None if residual is None else total,
        rows,
        features,
        inner,
        outer_stride,
        inner_stride,
        float(eps),
        BLOCK_F=block,
        BLOCK_R=some,
        num_warps=norm_warps(block),
        enable_fp_fusion=FP_FUSION,
    )
    return out, total


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    require_listed(Pointwise(f"gated {activation}", dtype_name(gate_up.dtype), GATED_BLOCK), gate_up.device)
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    tokens, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, features, dtype=gate_up.dtype, device=gate_up.device)
    gated_kernel[(tokens, ceil_div(features, GATED_BLOCK))](
        gate_up, out, features, gate_up.stride(0), ACTIVATION=activation, BLOCK=GATED_BLOCK, num_warps=4, enable_fp_fusion=FP_FUSION
    )
    return out


def _strided_rows(x: torch.Tensor) -> tuple[int, int, int, int, torch.Tensor]:
    """x as rows: how many, how many inside one step of the outer stride, both strides, and x itself (copied if they cannot say it)."""
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    rows = x.numel() // x.shape[-1]
    if x.dim() == 3:
        return rows, x.shape[1], x.stride(0), x.stride(1), x
    if x.dim() == 2:
        return rows, 1, x.stride(0), 0, x
    x = x.contiguous()
    return rows, 1, x.shape[-1], 0, x
