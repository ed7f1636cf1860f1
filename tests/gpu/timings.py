"""Decode attention on the device: bytes of K and V over time, beside torch's own attention and the bandwidth measured in the same run.

Times come from device events around many launches after warm-up; the tensors are larger than any cache or are cycled through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.measure.clock import device_timed
from kernels.api import Ops
from kernels.codec import CODECS, codec_named
from kernels.rows import DenseRows, Mask, PagedRows, RowStore
from tests.kernels.cases import batch_of

PAGE = 16
WARM_CALLS = 4


@dataclass(frozen=True)
class Point:
    """One measurement: `batch` sequences of `context` tokens decode one token each."""

    batch: int
    context: int
    codec: str
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the step has to read."""
        return 2 * self.batch * self.context * self.kv_heads * CODECS[self.codec].row_bytes(self.head_dim, "bfloat16")


def points(quick: bool) -> list[Point]:
    if quick:
        return [Point(2, 32, codec, 2, 1, 64) for codec in ("raw", "int8")]
    sizes = [(batch, context) for batch in (1, 16, 64) for context in (1024, 8192, 32768)]
    return [Point(batch, context, codec, 32, 8, 128) for batch, context in sizes for codec in ("raw", "int8", "q8_0", "q4_0")]


def measured(ops: Ops, device: str, quick: bool) -> dict:
    """{bandwidth_gb_s, attention: [...]}: seconds, GB/s and share of the measured bandwidth of each point and layout."""
    repeats = 1 if quick else 20
    limit = bandwidth(device, quick)
    rows = []
    for point in points(quick):
        for layout, call in callables(ops, point, device).items():
            rows.append(row(point, layout, call, device, repeats, limit))
        if point.codec == "raw":
            for name, call in torch_callables(point, device).items():
                rows.append(row(point, name, call, device, repeats, limit))
        if device == "cuda":
            torch.cuda.empty_cache()
    return {"bandwidth_gb_s": limit, "attention": rows}


def row(point: Point, name: str, call: Callable[[], torch.Tensor], device: str, repeats: int, limit: float) -> dict:
    try:
        taken_s = seconds(call, device, repeats)
    except (RuntimeError, NotImplementedError) as fault:  # a peer that cannot run here is named, not dropped
        return {**vars(point), "kernel": name, "failed": f"{type(fault).__name__}: {fault}"[:300]}
    rate = point.kv_bytes / taken_s / 1e9
    return {**vars(point), "kernel": name, "seconds": taken_s, "gb_s": rate, "of_bandwidth": rate / limit}


def bandwidth(device: str, quick: bool) -> float:
    """GB/s of a large copy, read and write counted."""
    values = torch.zeros(2**16 if quick else 2**29, dtype=torch.float32, device=device)
    target = torch.empty_like(values)
    taken_s = seconds(lambda: target.copy_(values), device, 1 if quick else 10)
    return 2 * values.numel() * 4 / taken_s / 1e9


def seconds(call: Callable[[], torch.Tensor], device: str, repeats: int) -> float:
    """Median seconds of one call."""
    for _ in range(WARM_CALLS if repeats > 1 else 1):
        call()
    return sorted(device_timed(device, call, repeats))[repeats // 2]


def callables(ops: Ops, point: Point, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """The same step over paged rows in shuffled pages and over dense rows."""
    batch = batch_of(((point.context - 1, point.context),) * point.batch)
    batch = type(batch)(batch.cu_seqlens.to(device), batch.starts.to(device), batch.spans)
    pages_each = -(-point.context // PAGE)
    count = point.batch * pages_each * PAGE
    keys, values = (filled(ops, point, count, device) for _ in "kv")
    q = torch.randn(point.batch, point.query_heads, point.head_dim, dtype=torch.bfloat16, device=device)
    pages = torch.randperm(point.batch * pages_each).view(point.batch, pages_each).to(torch.int32).to(device)
    bases = torch.arange(point.batch) * pages_each * PAGE
    dense_rows = DenseRows(bases.to(device), tuple(bases.tolist()))
    scale = point.head_dim**-0.5
    flat = [RowStore(s.codec, s.heads, s.head_dim, s.dtype, None, s.codes, s.scales) for s in (keys, values)]
    return {
        "paged": lambda: ops.attend_paged(q, keys, values, PagedRows(pages, PAGE), batch, Mask(), scale, None),
        "dense": lambda: ops.attend_dense(q, *flat, dense_rows, batch, Mask(), scale, None),
    }


def filled(ops: Ops, point: Point, count: int, device: str) -> RowStore:
    """A store of random codes: time does not depend on the numbers."""
    store = ops.new_rows(codec_named(point.codec), count, point.kv_heads, point.head_dim, torch.bfloat16, device, PAGE)
    if store.codes.is_floating_point():
        store.codes.normal_()
    else:
        store.codes.random_(0, 127)
    if store.scales is not None:
        store.scales.fill_(0.01)
    return store


def torch_callables(point: Point, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """torch's own attention over contiguous K and V: scaled_dot_product_attention, and FlexAttention compiled."""
    shape = (point.batch, point.kv_heads, point.context, point.head_dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in "kv")
    q = torch.randn(point.batch, point.query_heads, 1, point.head_dim, dtype=torch.bfloat16, device=device)
    peers = {"torch sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)}
    if device == "cuda" and point.context == 8192:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention)
        peers["torch flex_attention"] = lambda: compiled(q, k, v, enable_gqa=True)
    return peers
