"""CPU attention against float64: never further off than twice the reference in the same dtype, plus one rounding step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels.api import Ops
from kernels.backend import resolve
from kernels.codec import CODECS
from kernels.rows import DenseRows, Mask, PagedRows
from tests.kernels.cases import NAMES, Case, Step, assert_as_close_as_reference, attention, batch_of, step_of

REFERENCE = resolve("reference")
FAST = [torch.float32, torch.bfloat16]
MASKS = (Mask(), Mask(window=1), Mask(window=7), Mask(window=7, sinks=2), Mask(window=100, sinks=50))
DECODE = ((700, 701), (0, 1), (63, 64), (64, 65), (255, 256), (17, 18))
LONG = ((0, 150), (300, 331), (90, 190))


def check(case: Case, ops: Ops) -> Step:
    step = step_of(case, ops)
    assert_as_close_as_reference(step.attend(ops), step_of(case, REFERENCE).attend(REFERENCE), step.exact)
    return step


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("page_size", [None, 1, 4, 16])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_ragged_spans(ops: Ops, mask: Mask, page_size: int | None, dtype: torch.dtype) -> None:
    check(Case(dtype, mask=mask, page_size=page_size), ops)


@pytest.mark.parametrize("dtype", FAST, ids=NAMES.get)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(6, 3), (8, 2), (9, 3), (4, 1), (3, 3), (10, 2), (7, 1), (16, 2)])
def test_shared_heads(ops: Ops, query_heads: int, kv_heads: int, page_size: int | None, dtype: torch.dtype) -> None:
    check(Case(dtype, query_heads=query_heads, kv_heads=kv_heads, page_size=page_size), ops)


@pytest.mark.parametrize("dtype", FAST, ids=NAMES.get)
@pytest.mark.parametrize("head_dim", [8, 16, 20, 40, 64, 80, 96, 100, 128, 256])
def test_head_dims(ops: Ops, head_dim: int, dtype: torch.dtype) -> None:
    check(Case(dtype, head_dim=head_dim), ops)


@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("codec_v", CODECS)
@pytest.mark.parametrize("codec_k", CODECS)
def test_every_pair_of_codecs(ops: Ops, codec_k: str, codec_v: str, head_dim: int) -> None:
    check(Case(torch.float32, codec_k, codec_v, head_dim=head_dim), ops)


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_of_bfloat16_rows(ops: Ops, codec: str) -> None:
    check(Case(torch.bfloat16, codec, codec, head_dim=64), ops)


@pytest.mark.parametrize("dtype", FAST, ids=NAMES.get)
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(ops: Ops, softcap: float, dtype: torch.dtype) -> None:
    check(Case(dtype, softcap=softcap), ops)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=300), Mask(window=130, sinks=5)], ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dtype", FAST, ids=NAMES.get)
def test_long_decode(ops: Ops, dtype: torch.dtype, page_size: int | None, mask: Mask) -> None:
    check(Case(dtype, query_heads=9, kv_heads=3, head_dim=64, spans=DECODE, page_size=page_size, mask=mask), ops)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=100, sinks=3)], ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dtype", FAST, ids=NAMES.get)
def test_long_chunks(ops: Ops, dtype: torch.dtype, page_size: int | None, mask: Mask) -> None:
    check(Case(dtype, query_heads=6, kv_heads=2, head_dim=32, spans=LONG, page_size=page_size, mask=mask), ops)


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_packed(ops: Ops, dtype: torch.dtype) -> None:
    batch = batch_of(((0, 5), (0, 1), (0, 90)))
    q, k, v = (torch.randn(batch.tokens, heads, 32, generator=torch.Generator().manual_seed(heads)).to(dtype) for heads in (6, 2, 2))
    mask = Mask(window=40, sinks=1)
    parts = [slice(int(low), int(high)) for low, high in pairwise(batch.cu_seqlens)]
    exact = np.concatenate([attention(*(x[part].double().numpy() for x in (q, k, v)), 0, mask, 0.2, None) for part in parts])
    reference = REFERENCE.attend_packed(q, k, v, batch, mask, 0.2, None)
    assert_as_close_as_reference(ops.attend_packed(q, k, v, batch, mask, 0.2, None), reference, exact)


@pytest.mark.parametrize("dtype", FAST, ids=NAMES.get)
@pytest.mark.parametrize("page_size", [None, 16])
def test_large_scores_do_not_overflow(ops: Ops, page_size: int | None, dtype: torch.dtype) -> None:
    step = step_of(Case(dtype, page_size=page_size), ops)
    step.q.mul_(200)
    reference = step.attend(REFERENCE)
    assert torch.isfinite(step.attend(ops)).all()
    assert torch.allclose(step.attend(ops).float(), reference.float(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_row_that_a_query_sees_and_that_is_nan_shows(ops: Ops, page_size: int | None) -> None:
    case = Case(page_size=page_size, spans=((5, 6), (0, 1), (37, 38)))
    step = step_of(case, ops)
    slot = step.where.host[2] + 20 if page_size is None else int(step.where.pages[2, 1]) * 16 + 4
    ops.write_rows(step.keys, torch.tensor([slot]), torch.full((1, 3, 32), float("nan")))
    out = step.attend(ops)
    assert torch.isnan(out[2]).all()
    assert torch.isfinite(out[:2]).all()


@pytest.mark.parametrize("spans", [DECODE, LONG], ids=["decode", "chunks"])
@pytest.mark.parametrize("dtype", FAST, ids=NAMES.get)
def test_batch_mates_change_no_bit(ops: Ops, dtype: torch.dtype, spans: tuple[tuple[int, int], ...]) -> None:
    step = step_of(Case(dtype, spans=spans, head_dim=64, page_size=16), ops)
    together, at = step.attend(ops), 0
    for b, (start, stop) in enumerate(spans):
        rows = slice(at, at + stop - start)
        at = rows.stop
        alone = replace(step, q=step.q[rows], where=PagedRows(step.where.pages[b : b + 1], 16), batch=batch_of(((start, stop),)))
        assert torch.equal(alone.attend(ops), together[rows])


@pytest.mark.parametrize("spans", [DECODE, LONG], ids=["decode", "chunks"])
def test_answers_are_repeatable_to_the_bit(ops: Ops, spans: tuple[tuple[int, int], ...]) -> None:
    step = step_of(Case(spans=spans, head_dim=64, query_heads=9), ops)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first = step.attend(ops)
        assert all(torch.equal(step.attend(ops), first) for _ in range(10))
    finally:
        torch.set_num_threads(threads)


def test_views_are_taken_as_they_are(ops: Ops) -> None:
    step = step_of(Case(head_dim=64, query_heads=6, kv_heads=3), ops)
    wide = torch.full((step.q.shape[0], 12, 64), float("nan"))
    wide[:, 3:9] = step.q
    assert torch.equal(replace(step, q=wide[:, 3:9]).attend(ops), step.attend(ops))


def test_inputs_are_never_changed(ops: Ops) -> None:
    step = step_of(Case(codec_k="int8", codec_v="q4_0", head_dim=64, mask=Mask(window=9, sinks=2)), ops)
    tensors = [step.q, step.keys.codes, step.keys.scales, step.values.codes, step.values.scales, step.where.pages]
    before = [tensor.clone().view(torch.uint8) for tensor in tensors]
    step.attend(ops)
    assert all(torch.equal(tensor.view(torch.uint8), old) for tensor, old in zip(tensors, before, strict=True))


def test_dense_rows_far_into_a_large_store(ops: Ops) -> None:
    count = 40_000
    case = Case(head_dim=64, kv_heads=2, query_heads=2, page_size=None, spans=((9, 10),))
    step = step_of(case, ops)
    keys, values = (ops.new_rows(store.codec, count, 2, 64, torch.float32, "cpu", None) for store in (step.keys, step.values))
    for far, near in ((keys, step.keys), (values, step.values)):
        far.codes.fill_(float("nan"))
        ops.write_rows(far, torch.arange(count - 10, count), ops.read_rows(near, torch.arange(10) + step.where.host[0]))
    moved = replace(step, keys=keys, values=values, where=DenseRows(torch.tensor([count - 10]), (count - 10,)))
    assert torch.equal(moved.attend(ops), step.attend(ops))
