"""The compiled row writes and pointwise ops: what their tensors look like to the kernels.

It does not know whose rows these are. dtypes without a kernel are the caller's to send elsewhere.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import cache

import torch

from kernels.cpu import encode, layers, team
from kernels.cpu.native import RAW, float_bits, store_words
from kernels.rows import RowStore

TEAM_VALUES = 1 << 15  # values that are worth waking a second thread for
OPS = {"silu": layers.SILU, "gelu_tanh": layers.GELU_TANH}


@cache
def _write_kernel():
    return encode.make_write()


@cache
def _layers_kernel():
    return layers.make_layers()


def write_rows(store: RowStore, slots: torch.Tensor, rows: torch.Tensor) -> None:
    rows, slots = rows if rows.stride(2) == 1 else rows.contiguous(), slots.contiguous()
    tokens, heads, dim = rows.shape
    size = rows.element_size()
    tasks = -(-tokens // encode.TASK_TOKENS)
    threads = _threads(rows.numel(), tasks)
    scratch = -(-4 * dim // 64) * 64
    args = array("q", (
        0, 0, tasks, team.workspace("scratch", scratch * threads), scratch,
        rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size, RAW[rows.dtype], dim * size,
        slots.data_ptr(), tokens, heads, dim, store.count, 0, *store_words(store),
    ))  # fmt: skip
    team.run(_write_kernel().address, args.buffer_info()[0], threads)
    if args[encode.FAULTS]:
        raise IndexError(f"slots {slots.min().item()}..{slots.max().item()} lead outside the store of {store.count} rows")


def copy_pages(stores: list[RowStore], sources: torch.Tensor, targets: torch.Tensor) -> None:
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
    for store in stores:
        pages = store.count // store.page_size
        if any(not 0 <= page < pages for pair in pairs for page in pair):
            raise IndexError(f"pages {pairs} lead outside the store of {pages} pages")
        for tensor in (store.codes, store.scales):
            if tensor is None:
                continue
            size = store.page_size * tensor.stride(0) * tensor.element_size()
            base = tensor.data_ptr()
            for source, target in pairs:
                ctypes.memmove(base + target * size, base + source * size, size)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = x if x.stride(2) == 1 else x.contiguous()
    if cos.dtype != torch.float32 or not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = (part.to(torch.float32).contiguous() for part in (cos, sin))
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads, dim), dtype=x.dtype)
    half = cos.shape[1]
    _run(layers.ROPE, x, tokens * heads, heads, x.stride(0), x.stride(1), out, dim, (cos.data_ptr(), 4 * half, 0, sin.data_ptr(), half, 0))
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1]
    if weight.dtype != torch.float32 or not weight.is_contiguous():
        weight = weight.to(torch.float32).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    rows = x.numel() // size
    if residual is None:
        at, inner, outer_step, inner_step = _pitched(x)
        _run(layers.NORM, at, rows, inner, outer_step, inner_step, out, size, (0, 0, 0, weight.data_ptr(), 0, float_bits(eps)))
        return out, x
    total = torch.empty(x.shape, dtype=x.dtype)
    at, residual = x.contiguous(), residual.contiguous()
    step = size * x.element_size()
    extra = (residual.data_ptr(), step, 0, weight.data_ptr(), total.data_ptr(), float_bits(eps))
    _run(layers.NORM_ADD, at, rows, 1, size, 0, out, size, extra)
    return out, total


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate_up = gate_up if gate_up.is_contiguous() else gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
    _run(OPS[activation], gate_up, out.numel() // size, 1, 2 * size, 0, out, size, (0, 0, 0, 0, 0, 0))
    return out


def _run(
    op: int, x: torch.Tensor, rows: int, inner: int, outer_step: int, inner_step: int, out: torch.Tensor, size: int, extra: tuple
) -> None:
    address, words, threads = call(op, x, rows, inner, outer_step, inner_step, out, size, extra)
    team.run(address, words.buffer_info()[0], threads)


def call(
    op: int, x: torch.Tensor, rows: int, inner: int, outer_step: int, inner_step: int, out: torch.Tensor, size: int, extra: tuple
) -> tuple[int, array, int]:
    """(kernel, its words, threads). Steps in elements. Rows are handed out so that each task is worth taking; `extra` is words A to EPS."""
    width = x.element_size()
    per_task = max(1, TEAM_VALUES // (2 * size))
    tasks = -(-rows // per_task)
    words = (0, tasks, op, RAW[x.dtype], rows, inner, per_task, x.data_ptr(), outer_step * width, inner_step * width, out.data_ptr(), size)
    return _layers_kernel().address, array("q", (*words, *extra)), _threads(rows * size, tasks)


def _pitched(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """x as rows [outer, inner] of its last axis: (x or a copy, inner, steps of both)."""
    if x.dim() == 3 and x.stride(2) == 1:
        return x, x.shape[1], x.stride(0), x.stride(1)
    x = x if x.is_contiguous() else x.contiguous()
    return x, 1, x.shape[-1], 0


def _threads(values: int, tasks: int) -> int:
    return 1 if values < TEAM_VALUES else min(torch.get_num_threads(), tasks)
