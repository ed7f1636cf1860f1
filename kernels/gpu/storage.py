"""Launching the row ops: write, read, copy pages, move. Bytes move as the reference moves them; nothing here knows whose they are."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl

from kernels.gpu.copy_pages import copy_kernel
from kernels.gpu.launch import FP_FUSION, as_bytes_of_code, ceil_div, dtype_name, pitched, require_listed
from kernels.gpu.rows import read_kernel, write_kernel
from kernels.gpu.specialisations import Copy, Rows, block_dim, row_block
from kernels.rows import RowStore

WORDS = {8: tl.int64, 1: tl.uint8}
COPY_BLOCK = 1024  # words that a program moves at a time


def write_rows(store: RowStore, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Encode rows [T, heads, head_dim] into `slots` [T]."""
    tokens, heads, head_dim = rows.shape
    require_listed(Rows("write", store.codec.name, dtype_name(rows.dtype), head_dim), rows.device)
    rows, pitch = pitched(rows)
    block = row_block(head_dim)
    write_kernel[(ceil_div(tokens * heads, block),)](
        rows,
        slots,
        as_bytes_of_code(store),
        store.scales,
        tokens * heads,
        heads,
        pitch,
        D=head_dim,
        BLOCK_D=block_dim(head_dim),
        BLOCK_R=block,
        CODEC=store.codec.name,
        num_warps=4,
        enable_fp_fusion=FP_FUSION,
    )


def read_rows(store: RowStore, slots: torch.Tensor) -> torch.Tensor:
    """Decoded rows `slots` [n] -> [n, heads, head_dim] in the working dtype."""
    require_listed(Rows("read", store.codec.name, dtype_name(store.dtype), store.head_dim), store.codes.device)
    out = torch.empty(slots.shape[0], store.heads, store.head_dim, dtype=store.dtype, device=store.codes.device)
    if slots.shape[0] == 0:
        return out
    count = slots.shape[0] * store.heads
    block = row_block(store.head_dim)
    read_kernel[(ceil_div(count, block),)](
        store.codes,
        store.scales,
        slots,
        out,
        count,
        store.heads,
        D=store.head_dim,
        BLOCK_D=block_dim(store.head_dim),
        BLOCK_R=block,
        CODEC=store.codec.name,
        num_warps=4,
        enable_fp_fusion=FP_FUSION,
    )
    return out


def copy_pages(stores: list[RowStore], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole pages as bytes: one launch for every tensor of every store whose pages are whole 8-byte words, one for the rest."""
    if sources.shape[0] == 0:
        return
    pages = [
        (tensor, _page_bytes(tensor, store.page_size)) for store in stores for tensor in (store.codes, store.scales) if tensor is not None
    ]
    for word, dtype in WORDS.items():
        chosen = [(t.data_ptr(), size // word) for t, size in pages if _widest_word(t, size) == word]
        if not chosen:
            continue
        require_listed(Copy(word), sources.device)
        bases, lengths = _on_device(tuple(chosen), sources.device)
        copy_kernel[(sources.shape[0], len(chosen))](
            bases, lengths, sources, targets, WORD=dtype, BLOCK=COPY_BLOCK, num_warps=4, enable_fp_fusion=FP_FUSION
        )


def move_rows(stores: list[RowStore], source: int, target: int, count: int) -> None:
    """Copy a run of rows as bytes, overlapping or not: a growing slab's rare event, so torch's own copy will do."""
    for store in stores:
        for tensor in (store.codes, store.scales):
            if tensor is not None:
                tensor[target : target + count] = tensor[source : source + count].clone()


def _page_bytes(tensor: torch.Tensor, page_size: int) -> int:
    return page_size * tensor[0].numel() * tensor.element_size()


def _widest_word(tensor: torch.Tensor, page_bytes: int) -> int:
    return next(word for word in WORDS if page_bytes % word == 0 and tensor.data_ptr() % word == 0)


@lru_cache(maxsize=64)
def _on_device(chosen: tuple[tuple[int, int], ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses and page lengths as device tensors, made once for a set of stores: a captured graph must not see a host copy."""
    table = torch.tensor(chosen, dtype=torch.int64).t().contiguous().to(device)
    return table[0], table[1]
