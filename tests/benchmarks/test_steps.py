"""One decode step and one prefill chunk of every strategy in `conf/strategy`: plan, decoder and commit, at toy size."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from harness.measure.gate import Mean
from harness.measure.reading import Reader
from tests.benchmarks import toy
from tests.benchmarks.pairs import group, paired


def at_length(name: str, length: int) -> Reader:
    """A new cache that has been fed `length` tokens."""
    side = toy.side(name)
    reader = Reader(side, side.cache.open(expect=toy.LENGTH + 1), toy.tokens())
    reader.feed(0, length)
    return reader


def step(reader: Reader, first: int, stop: int) -> tuple[int, torch.Tensor]:
    """Feed positions first..stop-1 -> the length that the cache began with, and the logits [1, V] of the last position."""
    cache = reader.side.cache
    began = reader.side.cache._histories[reader.sid].length
    plan = cache.plan({reader.sid: stop})
    ((_, start, _),) = plan.spans
    fed = toy.tokens()[start:stop]
    logits = reader.side.decoder(torch.tensor(fed), plan, cache)
    cache.commit(plan, fed)
    return began, logits


def expected(name: str, length: int, stop: int) -> torch.Tensor:
    """The same step, once, outside of any benchmark."""
    return step(at_length(name, length), length, stop)[1]


@lru_cache(maxsize=64)
def kl_of(name: str) -> Mean:
    """KL of a strategy: once for all passes."""
    return toy.kl(name)


@group("decode step")
@pytest.mark.parametrize("name", toy.NAMES)
def test_decode_step(benchmark, name):
    kl = kl_of(name)
    results = paired(
        benchmark,
        lambda: at_length(name, toy.LENGTH),
        lambda reader: step(reader, toy.LENGTH, toy.LENGTH + 1),
        lambda reader: toy.held(reader.side.cache),
        kl,
    )
    assert {began for began, _ in results} == {toy.LENGTH}
    assert all(torch.equal(logits, expected(name, toy.LENGTH, toy.LENGTH + 1)) for _, logits in results[-2:])


@group("prefill chunk")
@pytest.mark.parametrize("name", toy.NAMES)
def test_prefill_chunk(benchmark, name):
    results = paired(
        benchmark,
        lambda: at_length(name, toy.LENGTH - toy.CHUNK),
        lambda reader: step(reader, toy.LENGTH - toy.CHUNK, toy.LENGTH),
        lambda reader: toy.held(reader.side.cache),
    )
    assert {began for began, _ in results} == {toy.LENGTH - toy.CHUNK}
    assert all(torch.equal(logits, expected(name, toy.LENGTH - toy.CHUNK, toy.LENGTH)) for _, logits in results[-2:])


@pytest.mark.parametrize("name", ["contiguous", "contiguous_growth", "paged", "paged_prefix", "mha", "gqa"])
def test_a_lossless_strategy_has_no_kl(name):
    assert toy.kl(name).mean < 1e-9


@pytest.mark.parametrize("name", ["int8", "paged_q4", "kivi2", "window", "mqa"])
def test_a_lossy_strategy_has_some(name):
    assert toy.kl(name).low > 1e-9
