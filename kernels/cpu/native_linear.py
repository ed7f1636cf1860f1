"""The matrix product of the decoder on a CPU: compiled for a few rows of 16-bit weights, torch's own elsewhere.

It does not know what the weights are for. bfloat16 products on a CPU that has no instruction for them run in float32, which torch
does several times as fast, with the same single rounding at the end.
"""

from __future__ import annotations

from array import array
from functools import cache

import torch
from torch.nn import functional

from kernels.cpu import bfloat16, team
from kernels.cpu import linear as kernels
from kernels.cpu.emit import BLOCK
from kernels.cpu.narrow import host_multiplies_bfloat16
from kernels.cpu.native import RAW

FEW = 8  # rows of x up to which reading the weights is what takes the time
COMPILED_DTYPES = (torch.bfloat16, torch.float16)


@cache
def _kernel(group: int):
    return kernels.make_linear(group)


@cache
def _bfloat16_kernel(group: int):
    return bfloat16.make_linear(group)


@cache
def _multiplies_bfloat16() -> bool:
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N] in x's dtype."""
    tokens, inner = x.shape
    if x.dtype not in COMPILED_DTYPES or weight.dtype != x.dtype:
        return functional.linear(x, weight, bias)
    if tokens <= FEW and inner % BLOCK == 0 and weight.stride(1) == 1:
        return _compiled(x, weight, bias)
    if x.dtype == torch.bfloat16 and _multiplies_bfloat16():
        return functional.linear(x, weight, bias)
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _compiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous()
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    address, words, threads = call(x, weight, bias, out)
    team.run(address, words.buffer_info()[0], threads)
    return out


def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> tuple[int, array, int]:
    """(kernel, its words, threads) that write x @ weight.T + bias to `out`; x, bias and out are dense, and all are of one dtype."""
    (tokens, inner), outputs, size = x.shape, weight.shape[0], x.element_size()
    if x.dtype == torch.bfloat16 and outputs >= bfloat16.ROWS and host_multiplies_bfloat16():
        address, scratch, rows = _bfloat16_kernel(bfloat16.group_of(tokens)).address, 0, bfloat16.task_rows(inner)
    else:
        scratch, rows = -(-kernels.scratch_bytes(tokens, inner) // 64) * 64, kernels.PER_TASK
        address = _kernel(kernels.group_of(tokens)).address
    tasks = -(-outputs // rows)
    threads = min(torch.get_num_threads(), tasks)
    words = array("q", (
        0, 0, tasks, team.workspace("scratch", scratch * threads), scratch,
        x.data_ptr(), inner * size, RAW[x.dtype], tokens, inner, weight.data_ptr(), weight.stride(0) * size, outputs,
        0 if bias is None else bias.data_ptr(), int(bias is not None), out.data_ptr(), outputs * size, rows,
    ))  # fmt: skip
    return address, words, threads
