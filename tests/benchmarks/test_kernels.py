"""Attention over contiguous rows and over pages, and writing rows, for every codec."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import kernel_cases as cases
from tests.benchmarks import toy
from tests.benchmarks.pairs import group, paired

CODECS = pytest.mark.parametrize("codec", cases.CODEC_NAMES)


@group("attend, contiguous")
@CODECS
def test_attend_dense(benchmark, codec):
    _benchmark_attention(benchmark, codec, paged=False)


@group("attend, paged")
@CODECS
def test_attend_paged(benchmark, codec):
    _benchmark_attention(benchmark, codec, paged=True)


@group("write rows")
@CODECS
def test_write_rows(benchmark, codec):
    ops = toy.ops()
    slots = cases.paged_slots()[: cases.WRITTEN]
    rows = cases.inputs().k.flatten(0, 1)[: cases.WRITTEN]

    def write(stores: cases.Stored) -> cases.Stored:
        ops.write_rows(stores.keys, slots, rows)
        return stores

    complete = cases.stored(ops, codec, paged=False)
    whole = ops.read_rows(complete.keys, torch.arange(cases.WRITTEN))

    def used() -> cases.Stored:
        stores = cases.empty(ops, codec, paged=True)
        ops.write_rows(stores.keys, cases.paged_slots(), torch.zeros_like(cases.inputs().k).flatten(0, 1))
        return stores  # its memory has been touched: the first touch of a page costs more than writing it, and never the same

    results = paired(benchmark, used, write, lambda stores: stores.nbytes, cases.weights_kl(ops, complete))
    assert all(torch.equal(ops.read_rows(stores.keys, slots), whole) for stores in results)


def _benchmark_attention(benchmark, codec: str, paged: bool) -> None:
    ops = toy.ops()
    expected = cases.attend(ops, cases.stored(ops, codec, paged), paged)
    results = paired(
        benchmark,
        lambda: cases.stored(ops, codec, paged),
        lambda stores: cases.attend(ops, stores, paged),
        lambda stores: stores.nbytes,
        cases.output_kl(expected),
    )
    assert all(torch.equal(result, expected) for result in results)
    if codec == "raw":
        torch.testing.assert_close(results[-1].double(), cases.exact_outputs(), rtol=0, atol=1e-5)
