"""The ops as Triton kernels: on a GPU, or on the CPU in Triton's interpreter to check (never to time) them.

The row layout is the reference's. `kivi` keeps groups of keys that no row format describes, so it stays on the reference backend.
Split-over-keys runs when the plan asks for it (`Batch.splits`), or when the tiles of a decode step would leave the device idle
(`specialisations.key_splits`).
"""

from __future__ import annotations

import torch

from kernels.codec import Codec
from kernels.gpu import attention, storage
from kernels.gpu.layers import gated, rms_norm, rope
from kernels.reference import new_rows as reference_layout
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

__all__ = [
    "attend_dense",
    "attend_packed",
    "attend_paged",
    "copy_pages",
    "gated",
    "move_rows",
    "new_rows",
    "read_rows",
    "rms_norm",
    "rope",
    "write_rows",
]

ROUNDS_DECODED = True  # rows of scaled codecs enter the matrix instructions in the working dtype

copy_pages = storage.copy_pages
move_rows = storage.move_rows
read_rows = storage.read_rows
write_rows = storage.write_rows


def new_rows(
    codec: Codec, count: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str, page_size: int | None
) -> RowStore:
    return reference_layout(codec, count, heads, head_dim, dtype, device, page_size)


def attend_dense(
    q: torch.Tensor, keys: RowStore, values: RowStore, where: DenseRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    return attention.attend(q, keys, values, attention.Placed("dense", where.bases, 0, 0), batch, mask, scale, softcap)


def attend_paged(
    q: torch.Tensor, keys: RowStore, values: RowStore, where: PagedRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    placed = attention.Placed("paged", where.pages, where.pages.stride(0), where.page_size)
    return attention.attend(q, keys, values, placed, batch, mask, scale, softcap)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    placed = attention.Placed("packed", batch.cu_seqlens, 0, 0)  # every span starts at 0, so its first row is its first packed token
    return attention.attend(q, attention.as_store(k), attention.as_store(v), placed, batch, mask, scale, softcap)
