"""Inputs for benchmarks of single ops: seeded Q, K and V, stores of any codec whose pages lie in no order, and float64 answers.

It does not know strategies: it addresses rows itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from harness.measure.gate import Mean, mean_of
from kernels.api import Ops
from kernels.codec import CODECS, codec_named
from kernels.reference import attend_one
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

SEQUENCES, LENGTH, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 16, 128, 6, 3, 32, 16
WRITTEN = 64  # rows of one timed write
READ_OUT = 32  # outcomes of the distribution that an attention output is turned into
SEED = 11
FACTS = [SEQUENCES, LENGTH, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, WRITTEN, READ_OUT, SEED]
SCALE = HEAD_DIM**-0.5
CODEC_NAMES = tuple(CODECS)


@dataclass(frozen=True)
class Inputs:
    """q [B, Hq, D]; k, v [B, N, Hkv, D]; order [B * N / page_size]: where each page lies; read_out [D, outcomes]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    order: torch.Tensor
    read_out: torch.Tensor


@lru_cache(maxsize=1)
def inputs() -> Inputs:
    """Keys that make some tokens matter much more than others, so that a lost bit shows."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    q, k, v = normal(SEQUENCES, QUERY_HEADS, HEAD_DIM) * 2, *(normal(SEQUENCES, LENGTH, KV_HEADS, HEAD_DIM) for _ in "kv")
    order = torch.randperm(SEQUENCES * LENGTH // PAGE_SIZE, generator=generator)
    return Inputs(q, k, v, order, normal(HEAD_DIM, READ_OUT))


@dataclass(frozen=True)
class Stored:
    """K and V of all sequences behind one codec."""

    keys: RowStore
    values: RowStore

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the tensors held, and what the codec says one row takes."""
        row = self.keys.codec.row_bytes(HEAD_DIM, "float32")
        return {"keys_bytes": self.keys.nbytes, "values_bytes": self.values.nbytes, "row_bytes": row}


def stored(ops: Ops, codec: str, paged: bool) -> Stored:
    """New stores, written once."""
    rows = paged_slots() if paged else torch.arange(SEQUENCES * LENGTH)  # [B * N] int64
    stores = empty(ops, codec, paged)
    for store, x in ((stores.keys, inputs().k), (stores.values, inputs().v)):
        ops.write_rows(store, rows, x.flatten(0, 1))
    return stores


def empty(ops: Ops, codec: str, paged: bool) -> Stored:
    """New stores of which no row has been written."""
    page_size = PAGE_SIZE if paged else None
    sizes = (SEQUENCES * LENGTH, KV_HEADS, HEAD_DIM, torch.float32, "cpu", page_size)
    return Stored(*(ops.new_rows(codec_named(codec), *sizes) for _ in "kv"))


def paged_slots() -> torch.Tensor:
    """[B * N] int64: where each token's row lies in a paged store."""
    return (inputs().order[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()


def attend(ops: Ops, stores: Stored, paged: bool) -> torch.Tensor:
    """The last token of every sequence attends to all of its own -> [B, Hq, D]."""
    cu_seqlens = torch.arange(SEQUENCES + 1, dtype=torch.int32)
    starts = torch.full((SEQUENCES,), LENGTH - 1, dtype=torch.int32)
    batch = Batch(cu_seqlens, starts, ((LENGTH - 1, LENGTH),) * SEQUENCES)
    if paged:
        where = PagedRows(inputs().order.view(SEQUENCES, -1).to(torch.int32), PAGE_SIZE)
        return ops.attend_paged(inputs().q, stores.keys, stores.values, where, batch, Mask(), SCALE, None)
    bases = range(0, SEQUENCES * LENGTH, LENGTH)
    where = DenseRows(torch.tensor(bases), tuple(bases))
    return ops.attend_dense(inputs().q, stores.keys, stores.values, where, batch, Mask(), SCALE, None)


def output_kl(outputs: torch.Tensor) -> Mean:
    """KL between what attention's output [B, Hq, D] and the exact one, from raw rows in float64, say through one read-out."""
    return mean_of(_kl(exact_outputs() @ inputs().read_out.double(), outputs.double() @ inputs().read_out.double()))


def weights_kl(ops: Ops, stores: Stored) -> Mean:
    """KL between attention weights over the keys as read back, and over the raw ones; head by head."""
    keys = ops.read_rows(stores.keys, torch.arange(SEQUENCES * LENGTH)).view_as(inputs().k)
    return mean_of(_kl(_scores(inputs().k), _scores(keys)))


@lru_cache(maxsize=1)
def exact_outputs() -> torch.Tensor:
    """[B, Hq, D] float64, from raw rows."""
    x, last, all_of_them = inputs(), torch.tensor([LENGTH - 1]), torch.arange(LENGTH)
    sides = zip(x.q.double(), x.k.double(), x.v.double(), strict=True)
    return torch.cat([attend_one(q[None], k, v, last, all_of_them, Mask(), SCALE, None) for q, k, v in sides])


def _scores(keys: torch.Tensor) -> torch.Tensor:
    """[B, Hq, N] float64."""
    grouped = inputs().q.double().unflatten(1, (KV_HEADS, -1))  # [B, Hkv, Hq / Hkv, D]
    return SCALE * torch.einsum("bhgd,bnhd->bhgn", grouped, keys.double()).flatten(1, 2)


def _kl(exact: torch.Tensor, given: torch.Tensor) -> list[float]:
    """KL(exact || given) in nats of softmaxes over the last axis."""
    p, q = (torch.log_softmax(x, -1) for x in (exact, given))
    return (p.exp() * (p - q)).sum(-1).flatten().tolist()
