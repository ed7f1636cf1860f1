"""KIVI's two formats (Liu et al. 2024): keys per channel over a group of tokens, values per token over a group of channels.

Arithmetic only; it does not know which tokens a group holds.

Both are asymmetric: lo and hi are the smallest and largest value of the group's real elements; scale = (hi - lo) / (2^bits - 1)
and zero = lo, computed in float32 (float64 for float64 rows), clamped to +-65504 and stored as float16 by way of float32;
codes = clamp(rint((x - zero) / scale), 0, 2^bits - 1) from the *stored* scale and zero, ties to even, and 0 where the stored
scale is 0; the decoded value is code * scale + zero. Keys: one group is `group` tokens of one head and channel. Values: one
group is up to `value_group` neighbouring channels of one token and head, the last of a row may be short. Codes are packed
8 / bits to a byte along the channels, value i of a row in the bits from bits * (i % (8 / bits)) of byte i // (8 / bits).
The zero point is not forced into the code range: a channel far from zero keeps its precision.
"""

from __future__ import annotations

import torch

FLOAT16_MAX = 65504.0


def encode_keys(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One group of rows [G, H, D] -> packed codes [G, H, bytes] uint8, scale [H, D], zero [H, D] float16."""
    codes, scale, zero = _encode(_wide(rows), bits, dim=0)
    return _pack(codes, bits), scale.squeeze(0), zero.squeeze(0)


def decode_keys(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """codes [n, G, H, bytes], scale and zero [n, H, D] -> rows [n, G, H, D] in `dtype`."""
    values = _unpack(codes, bits)[..., : scale.shape[-1]].to(dtype)
    return values * scale[:, None].to(dtype) + zero[:, None].to(dtype)


def encode_values(rows: torch.Tensor, bits: int, value_group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [G, H, D] -> packed codes [G, H, bytes] uint8, scale and zero [G, H, ceil(D / value_group)] float16."""
    parts = [_encode(part, bits, dim=-1) for part in _wide(rows).split(value_group, dim=-1)]
    codes, scale, zero = (torch.cat(each, dim=-1) for each in zip(*parts, strict=True))
    return _pack(codes, bits), scale, zero


def decode_values(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, value_group: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """codes [..., bytes], scale and zero [..., groups] -> rows [..., head_dim] in `dtype`."""
    values = _unpack(codes, bits)[..., :head_dim].to(dtype)
    scale, zero = (x.to(dtype).repeat_interleave(value_group, dim=-1)[..., :head_dim] for x in (scale, zero))
    return values * scale + zero


def packed_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one head's codes of one token."""
    return -(-head_dim * bits // 8)


def _wide(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.dtype == torch.float64 else rows.float()


def _encode(x: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top = 2**bits - 1
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale, zero = _half((high - low) / top), _half(low)
    step = scale.to(x.dtype)
    codes = torch.round((x - zero.to(x.dtype)) / torch.where(step == 0, 1.0, step)).clamp(0, top)
    return torch.where(step == 0, 0.0, codes), scale, zero


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FLOAT16_MAX, FLOAT16_MAX).float().half()


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_byte)).to(torch.uint8).unflatten(-1, (-1, per_byte))
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.uint8) * bits
    return (padded << shifts).sum(-1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(8 // bits, device=packed.device, dtype=torch.uint8) * bits
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
