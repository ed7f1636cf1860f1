"""Launching attention: one kernel for every layout, and a merge when the keys are split.

It chooses the tile and the number of splits from constants of the plan; it does not know what the rows mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from kernels.codec import codec_named
from kernels.gpu.attend import attend_kernel, merge_kernel
from kernels.gpu.launch import (
    FP_FUSION,
    ceil_div,
    dtype_name,
    keys_of,
    merge_rows,
    on_amd,
    pitched,
    processors,
    register_limit,
    require_listed,
)
from kernels.gpu.specialisations import Attend, Merge, block_dim, key_splits, query_rows, tuning
from kernels.reference import compute_dtype
from kernels.rows import Batch, Mask, RowStore

MERGE_SPLITS = 8  # splits that the merge reads at a time


@dataclass(frozen=True)
class Placed:
    """Where the rows of each span lie: `table` [B, P] pages, or [B] the row of position 0."""

    layout: str
    table: torch.Tensor
    width: int  # elements from one span's pages to the next's
    page_size: int


def as_store(x: torch.Tensor) -> RowStore:
    """This step's own k or v [T, Hkv, D] as a store of raw rows, without a copy."""
    return RowStore(codec_named("raw"), x.shape[1], x.shape[2], x.dtype, None, x, None)


def attend(
    q: torch.Tensor, keys: RowStore, values: RowStore, placed: Placed, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    """q [T, Hq, D] over the stored rows of its spans -> [T, Hq, D] in q's dtype."""
    tokens, q_heads, head_dim = q.shape
    group, spans = q_heads // keys.heads, len(batch.spans)
    rows = query_rows(group, tokens, spans, dtype_name(q.dtype))
    tile_queries = rows // group
    tiles = tokens // tile_queries + spans  # at least the sum of each span's tiles, from constants of the plan
    splits = key_splits(batch.splits, tiles * keys.heads, batch.longest, processors(q.device))
    spec = Attend(
        placed.layout, keys.codec.name, values.codec.name, dtype_name(q.dtype), head_dim, rows, mask.window is not None, softcap is not None
    )
    require_listed(spec, q.device)
    chosen = tuning(spec, on_amd())
    q, q_pitch = pitched(q)
    k_codes, k_pitch = _codes(keys)
    v_codes, v_pitch = _codes(values)
    out = torch.empty(tokens, q_heads, head_dim, dtype=q.dtype, device=q.device)
    parts, lse = _partials(out, splits)
    attend_kernel[(tiles, keys.heads, splits)](
        q,
        k_codes,
        keys.scales,
        v_codes,
        values.scales,
        out,
        parts,
        lse,
        placed.table,
        batch.cu_seqlens,
        batch.starts,
        spans,
        q_pitch,
        k_pitch,
        v_pitch,
        group,
        tile_queries,
        placed.width,
        placed.page_size,
        float(scale),
        1.0 if softcap is None else float(softcap),
        0 if mask.window is None else mask.window,
        mask.sinks,
        D=head_dim,
        BLOCK_D=block_dim(head_dim),
        BLOCK_M=rows,
        BLOCK_N=keys_of(chosen),
        CODEC_K=keys.codec.name,
        CODEC_V=values.codec.name,
        PAGED=placed.layout == "paged",
        WINDOWED=spec.windowed,
        SOFTCAPPED=spec.softcapped,
        num_warps=chosen.warps,
        enable_fp_fusion=FP_FUSION,
        num_stages=chosen.stages,
        **register_limit(chosen),
    )
    return out if splits == 1 else merge(parts, lse, out)


def merge(parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """parts [T, Hq, splits, D], each a mean weighted within its split, and the splits' lse [T, Hq, splits] -> out [T, Hq, D]."""
    tokens, heads, splits, head_dim = parts.shape
    require_listed(Merge(dtype_name(out.dtype), head_dim), out.device)
    rows, block = tokens * heads, merge_rows()
    merge_kernel[(ceil_div(rows, block),)](
        parts,
        lse,
        out,
        rows,
        splits,
        D=head_dim,
        BLOCK_D=block_dim(head_dim),
        BLOCK_R=block,
        BLOCK_S=MERGE_SPLITS,
        num_warps=4,
        enable_fp_fusion=FP_FUSION,
    )
    return out


def _partials(out: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What each split will find: parts [T, Hq, splits, D] and lse [T, Hq, splits]. Unsplit, nobody writes them: one element stands in."""
    dtype = compute_dtype(out.dtype)
    if splits == 1:
        unused = _unused(dtype, out.device)
        return unused, unused
    tokens, heads, head_dim = out.shape
    parts = torch.empty(tokens, heads, splits, head_dim, dtype=dtype, device=out.device)
    return parts, torch.empty(tokens, heads, splits, dtype=dtype, device=out.device)


@lru_cache
def _unused(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=dtype, device=device)


def _codes(store: RowStore) -> tuple[torch.Tensor, int]:
    """The code tensor and the heads from one of its rows to the next."""
    return (store.codes, store.heads) if store.codes.is_contiguous() else pitched(store.codes)
