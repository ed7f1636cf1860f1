"""rope, rms_norm and the gated activation through torch's fused CPU ops, rounding where the reference rounds.

It does not know about layers or positions; it gets the angles' cosines and sines.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.reference import compute_dtype


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[1]
    dtype = compute_dtype(x.dtype)
    wide = x.to(dtype)
    cos, sin = cos.to(dtype)[:, None, :], sin.to(dtype)[:, None, :]  # [T, 1, R]
    out = torch.empty_like(wide)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    out[..., 2 * half :] = wide[..., 2 * half :]
    return out.to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if residual is None else x + residual
    dtype = compute_dtype(x.dtype)
    return functional.rms_norm(total.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype), total


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return act.mul_(up).to(gate_up.dtype)
