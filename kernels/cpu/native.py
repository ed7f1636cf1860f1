"""The compiled attention ops: what a step's tensors look like to the kernels, and which kernel takes which spans.

It does not know which sequence a row belongs to.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections import deque
from dataclasses import dataclass
from functools import cache

import torch

from kernels.cpu import chunk, decode, team
from kernels.cpu.emit import BLOCK, FORMATS
from kernels.cpu.narrow import host_multiplies_bfloat16
from kernels.cpu.schedule import Tasks, plan_tasks
from kernels.cpu.shared import FAULTS
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

NO_WINDOW = 1 << 62  # farther than any two positions are apart
RAW = {torch.float32: FORMATS["float32"], torch.bfloat16: FORMATS["bfloat16"], torch.float16: FORMATS["float16"]}
_plans: deque[tuple] = deque(maxlen=8)  # the latest (batch, what else decides, its tasks)
_kept: list[object] = []  # compiled kernels whose addresses are in use
float_bits = cache(lambda value: struct.unpack("<i", struct.pack("<f", value))[0])


@dataclass(frozen=True)
class _Kernel:
    """A compiled kernel and the memory that it works in for one shape of heads."""

    address: int
    scratch_bytes: int  # of each thread
    partial_bytes: int  # of each unit


@cache
def _decode_kernel(heads: int, kv_heads: int, dim: int) -> _Kernel:
    address = _decode_address(decode.group_of(heads, kv_heads))
    return _Kernel(address, decode.scratch_bytes(heads, kv_heads, dim), decode.partial_bytes(heads, kv_heads, dim))


@cache
def _chunk_kernel(heads: int, kv_heads: int, dim: int) -> _Kernel:
    return _Kernel(_chunk_address(), chunk.scratch_bytes(heads, kv_heads, dim), chunk.partial_bytes(heads, kv_heads, dim))


@cache
def _decode_address(group: int) -> int:
    _kept.append(decode.make_decode(group))
    return _kept[-1].address


@cache
def _chunk_address() -> int:
    _kept.append(chunk.make_chunk(host_multiplies_bfloat16()))
    return _kept[-1].address


def attend_dense(
    q: torch.Tensor, keys: RowStore, values: RowStore, where: DenseRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    return _attend(
        q, keys.heads, keys.count, store_words(keys), store_words(values), (where.bases.data_ptr(), 0, 0), batch, mask, scale, softcap
    )


def attend_paged(
    q: torch.Tensor, keys: RowStore, values: RowStore, where: PagedRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    pages = where.pages if where.pages.stride(1) == 1 else where.pages.contiguous()
    table = (pages.data_ptr(), pages.stride(0), where.page_size)
    return _attend(q, keys.heads, keys.count, store_words(keys), store_words(values), table, batch, mask, scale, softcap)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    bases = batch.cu_seqlens.long()
    return _attend(q, k.shape[1], k.shape[0], _rows(k), _rows(v), (bases.data_ptr(), 0, 0), batch, mask, scale, softcap)


def _attend(q, kv_heads, count, keys, values, where, batch: Batch, mask: Mask, scale: float, softcap: float | None) -> torch.Tensor:
    q = q if q.stride(2) == 1 else q.contiguous()
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype)
    size = q.element_size()
    threads = torch.get_num_threads()
    singles, tiles = _tasks(batch, mask, threads, heads, kv_heads, dim)
    window = NO_WINDOW if mask.window is None else mask.window
    cap = 0 if softcap is None else float_bits(softcap)
    for tasks, kernel_for in ((singles, _decode_kernel), (tiles, _chunk_kernel)):
        if not len(tasks):
            continue
        kernel = kernel_for(heads, kv_heads, dim)
        team_size = min(threads, len(tasks))
        counters = team.workspace("counters", 8 * tasks.units)
        ctypes.memset(counters, 0, 8 * tasks.units)
        args = array("q", (
            0, 0, len(tasks), team.workspace("scratch", kernel.scratch_bytes * team_size), kernel.scratch_bytes, tasks.address,
            q.data_ptr(), q.stride(0) * size, q.stride(1) * size, RAW[q.dtype], out.data_ptr(),
            heads, kv_heads, dim, *keys, *values, *where,
            team.workspace("partials", kernel.partial_bytes * tasks.units), kernel.partial_bytes, counters,
            float_bits(scale), int(softcap is not None), cap, window, mask.sinks, dim * size, count, 0,
        ))  # fmt: skip
        team.run(kernel.address, args.buffer_info()[0], team_size)
        if args[FAULTS]:
            raise IndexError(f"this step's addresses lead outside the store of {count} rows")
    return out


def _tasks(batch: Batch, mask: Mask, threads: int, heads: int, kv_heads: int, dim: int) -> tuple[Tasks, Tasks]:
    """The step's tasks; every layer of a step asks for the same ones, so the latest are kept."""
    wanted = (mask, threads, heads, kv_heads, dim % BLOCK == 0)
    for known, made_for, tasks in tuple(_plans):
        if known is batch and made_for == wanted:
            return tasks
    tasks = plan_tasks(batch, mask, threads, kv_heads, chunk.tile_tokens(heads, kv_heads), dim % BLOCK == 0)
    _plans.appendleft((batch, wanted, tasks))
    return tasks


def store_words(store: RowStore) -> tuple[int, ...]:
    """The seven words of a store (see shared.py)."""
    codes, scales = store.codes, store.scales
    form = RAW[store.dtype] if store.codec.code_bits is None else FORMATS[store.codec.name]
    size = codes.element_size()
    row = codes.data_ptr(), codes.stride(0) * size, codes.stride(1) * size
    if scales is None:
        return (*row, 0, 0, 0, form)
    size = scales.element_size()
    return (*row, scales.data_ptr(), scales.stride(0) * size, scales.stride(1) * size, form)


def _rows(x: torch.Tensor) -> tuple[int, ...]:
    """The same for plain rows [n, heads, dim]."""
    size = x.element_size()
    return (x.data_ptr(), x.stride(0) * size, x.stride(1) * size, 0, 0, 0, RAW[x.dtype])
