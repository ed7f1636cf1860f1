"""Attention steps for the tests of every backend: poisoned stores, shuffled pages, and the float64 answer in NumPy.

It does not know which backend answers. Rows that no query of the step may see hold NaN wherever the format can hold one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from harness.conformance.codecs import ROUND_TRIPS
from kernels.api import Ops
from kernels.codec import codec_named
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

NAMES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
RAGGED = ((5, 6), (0, 1), (0, 3), (37, 38), (12, 19), (63, 64))  # decode, prefill and chunks in one step


@dataclass(frozen=True)
class Case:
    """One attention step. `spans` are (start, stop) positions of each sequence's queries."""

    dtype: torch.dtype = torch.float32
    codec_k: str = "raw"
    codec_v: str = "raw"
    query_heads: int = 6
    kv_heads: int = 3
    head_dim: int = 32
    spans: tuple[tuple[int, int], ...] = RAGGED
    mask: Mask = Mask()
    softcap: float | None = None
    page_size: int | None = 4  # None: dense rows
    seed: int = 0

    @property
    def scale(self) -> float:
        """What multiplies q . k."""
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Step:
    """Everything one attend call takes, and the same facts in float64."""

    case: Case
    q: torch.Tensor  # [T, Hq, D]
    keys: RowStore
    values: RowStore
    where: DenseRows | PagedRows
    batch: Batch
    exact: np.ndarray  # [T, Hq, D] float64

    def attend(self, ops: Ops) -> torch.Tensor:
        """What `ops` answers."""
        op = ops.attend_dense if self.case.page_size is None else ops.attend_paged
        return op(self.q, self.keys, self.values, self.where, self.batch, self.case.mask, self.case.scale, self.case.softcap)


def batch_of(spans: tuple[tuple[int, int], ...]) -> Batch:
    """The packed queries of these spans."""
    counts = [stop - start for start, stop in spans]
    cu_seqlens = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    return Batch(cu_seqlens, torch.tensor([start for start, _ in spans], dtype=torch.int32), spans)


def step_of(case: Case, ops: Ops) -> Step:
    """A step whose rows were written by `ops` into a store of its layout."""
    random = np.random.default_rng(case.seed)
    batch = batch_of(case.spans)
    q = _rounded(random.normal(size=(batch.tokens, case.query_heads, case.head_dim)), case.dtype)
    longest = max(stop for _, stop in case.spans)
    rows = [[_rounded(random.normal(size=(longest, case.kv_heads, case.head_dim)), case.dtype) for _ in case.spans] for _ in "kv"]
    where, slots_of, count = _placed(case, random)
    stores = []
    for codec, histories in zip((case.codec_k, case.codec_v), rows, strict=True):
        store = poisoned(ops, codec, count, case)
        for b, (start, stop) in enumerate(case.spans):
            seen = torch.from_numpy(reachable(start, stop, case.mask))
            ops.write_rows(store, slots_of(b, seen), histories[b][seen])
        stores.append(store)
    return Step(case, q, stores[0], stores[1], where, batch, _exact(case, q, *rows))


def poisoned(ops: Ops, codec: str, count: int, case: Case) -> RowStore:
    """A store of `ops`' layout full of NaN."""
    store = ops.new_rows(codec_named(codec), count, case.kv_heads, case.head_dim, case.dtype, "cpu", case.page_size)
    for tensor in (store.codes, store.scales):
        if tensor is not None and tensor.is_floating_point():
            tensor.fill_(float("nan"))
    return store


def reachable(start: int, stop: int, mask: Mask) -> np.ndarray:
    """Positions that some query of start..stop-1 may see, [n] int64."""
    j = np.arange(stop)
    near = np.ones(stop, dtype=bool) if mask.window is None else (start - j < mask.window) | (j < mask.sinks)
    return j[near]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, mask: Mask, scale: float, softcap: float | None) -> np.ndarray:
    """q [t, Hq, D] at positions start.. over k, v [start + t, Hkv, D] -> [t, Hq, D], one query and one head at a time."""
    out = np.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        i = start + t
        j = np.arange(i + 1)
        if mask.window is not None:
            j = j[(i - j < mask.window) | (j < mask.sinks)]
        for head in range(q.shape[1]):
            scores = scale * (k[j, head // group] @ q[t, head])
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ v[j, head // group] / weights.sum()
    return out


def decoded(rows: torch.Tensor, codec: str) -> np.ndarray:
    """The float64 values that `codec` reads these rows back as."""
    return ROUND_TRIPS[codec].read(rows.double().numpy(), NAMES[rows.dtype])


def one_rounding(exact: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Half a unit in the last place of `dtype` at each value: what rounding the right answer once may cost."""
    info = torch.finfo(dtype)
    return 0.5 * info.eps * np.maximum(np.abs(exact), info.smallest_normal)


def assert_as_close_as_reference(got: torch.Tensor, reference: torch.Tensor, exact: np.ndarray) -> None:
    """At most twice the reference's own distance from float64, plus one rounding step."""
    assert got.dtype == reference.dtype
    assert got.shape == reference.shape
    wrong = np.abs(got.double().numpy() - exact)
    honest = np.abs(reference.double().numpy() - exact).max()
    allowed = 2 * honest + 2 * one_rounding(exact, got.dtype)
    assert np.all(wrong <= allowed), f"off by {np.nanmax(wrong):.3g}, the reference by {honest:.3g}; {np.isnan(wrong).sum()} are NaN"


def _placed(case: Case, random: np.random.Generator):
    """Where each span's rows lie: the address the op takes, a function of (span, positions) to slots, and the rows of the store."""
    stops = [stop for _, stop in case.spans]
    if case.page_size is None:
        order = random.permutation(len(stops))
        bases, at = [0] * len(stops), 3
        for b in order:
            bases[b] = at
            at += stops[b] + 2
        return DenseRows(torch.tensor(bases), tuple(bases)), lambda b, positions: bases[b] + positions, at
    size = case.page_size
    widths = [-(-stop // size) for stop in stops]
    free = iter(1 + random.permutation(sum(widths)))
    pages = torch.zeros(len(stops), max(widths), dtype=torch.int32)
    for b, (start, stop) in enumerate(case.spans):
        for page in np.unique(reachable(start, stop, case.mask) // size):
            pages[b, page] = int(next(free))
    return (
        PagedRows(pages, size),
        lambda b, positions: pages[b].long()[positions // size] * size + positions % size,
        (sum(widths) + 1) * size,
    )


def _exact(case: Case, q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> np.ndarray:
    out, at = np.empty(q.shape), 0
    for b, (start, stop) in enumerate(case.spans):
        fed = slice(at, at + stop - start)
        at = fed.stop
        k, v = decoded(keys[b][:stop], case.codec_k), decoded(values[b][:stop], case.codec_v)
        out[fed] = attention(q[fed].double().numpy(), k, v, start, case.mask, case.scale, case.softcap)
    return out


def _rounded(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values).to(dtype)
