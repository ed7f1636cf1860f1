"""One budget for pools that fill up at different rates: what is predicted to fit fits, whatever the pools held before."""

from __future__ import annotations

import random

import pytest

from strategies.geometry import CacheFull
from strategies.kivi import Kivi
from strategies.paged import Paged
from tests.strategies.driving import Driver, coarse_value, nbytes, ops, shape

PAGE = 4 * 2 * 4 * 8  # four tokens of K and V in one float64 layer of `shape()`


def mixed(budget: int | None, **parameters: object) -> Paged:
    """A full layer and two with windows: three lanes."""
    return Paged(shape((None, 5, 9)), budget, ops(), page_size=4, **parameters)


def kivi(budget: int | None) -> Kivi:
    return Kivi(shape(), budget, ops(), group=4, residual=4, value_group=4)


@pytest.mark.parametrize("make", [mixed, kivi])
@pytest.mark.parametrize(("lengths", "chunk"), [([9] * 5, 9), ([40], 1), ([60], 60), ([3, 40, 17], 4), ([1] * 9, 1), ([31, 30], 5)])
def test_sequences_that_are_predicted_to_fit_a_budget_fit_it(make, lengths, chunk):
    driver = Driver(make(make(None).bytes_for(lengths, chunk)), coarse_value)
    sids = [driver.open() for _ in lengths]
    for at in range(0, max(lengths), chunk):
        driver.step({sid: [at % 16] * min(chunk, length - at) for sid, length in zip(sids, lengths, strict=True) if at < length})
        assert nbytes(driver.cache) <= driver.cache.budget_bytes
    for sid, length in zip(sids, lengths, strict=True):
        driver.truncate(sid, length)
        assert len(driver.logs[sid]) == length


@pytest.mark.parametrize(("codec", "top"), [("raw", 3.0), ("fp8", 4.0), ("int8", 127.0)])
def test_rows_survive_pools_that_shrink_and_grow(codec, top):
    budget = mixed(None, codec_v=codec).bytes_for([60, 16], 1)
    driver = Driver(mixed(budget, codec_v=codec), lambda token, position: [top * (token % 2), top * (position % 2), 0.0, top])
    sizes = set()
    for lengths in ([5, 2, 7], [30], [4] * 4):
        for length in lengths:
            driver.start([n % 3 for n in range(length)], 2)
        driver.fork(next(iter(driver.logs)))
        driver.look()
        sizes.add(tuple(lane.pool.capacity for lane in driver.cache._lanes))
        assert nbytes(driver.cache) <= budget
        while len(driver.logs) > 1:
            driver.close(max(driver.logs))
    assert len(sizes) > 1, "the pools were never rebalanced"
    driver.look()


def test_refused_plan_moves_nothing():
    driver = Driver(mixed(mixed(None).bytes_for([40], 1)))
    sid = driver.start([1 + n for n in range(20)], 1)
    before = driver.cache.stats(), [(tensor.data_ptr(), bytes(tensor.numpy())) for tensor in driver.cache.tensors()]
    with pytest.raises(CacheFull) as full:
        driver.plan({sid: [1] * 40})
    assert full.value.short_bytes > 0
    assert before == (driver.cache.stats(), [(tensor.data_ptr(), bytes(tensor.numpy())) for tensor in driver.cache.tensors()])
    driver.look()


def test_published_pages_in_use_are_found_after_their_pool_was_renumbered():
    driver = Driver(mixed(mixed(None).bytes_for([60, 12], 1), prefix=True))
    prompt = [1 + n for n in range(9)]
    driver.close(driver.start([40] * 12, 4))
    driver.start(prompt, 4)
    tables = [lane.tables.mapped(1) for lane in driver.cache._lanes]
    driver.start([50 + n % 3 for n in range(30)], 1)
    assert [lane.tables.mapped(1) for lane in driver.cache._lanes] != tables, "nothing was renumbered"
    driver.look()
    reader = driver.open(prompt)
    assert driver.cache.held(reader) == 8
    driver.feed(reader, prompt[8:])
    driver.look()


def test_aborted_plan_that_shifted_memory_leaves_rows_and_room():
    driver = Driver(mixed(mixed(None).bytes_for([40], 1)))
    sid = driver.start([1 + n for n in range(6)], 3)
    other = driver.start([2, 3])
    driver.abort_after({sid: [9] * 10})
    driver.look()
    driver.close(other)
    for _ in range(34):
        driver.step({sid: [7]})


@pytest.mark.parametrize(("seed", "prefix"), [(0, False), (1, True)])
def test_whatever_was_held_before_what_fits_the_budget_fits_the_cache(seed, prefix):
    rng = random.Random(seed)
    budget = mixed(None).bytes_for([24] * 3, 6)
    driver = Driver(mixed(budget, prefix=prefix))
    for _ in range(8):
        while driver.logs and rng.random() < 0.6:
            driver.close(rng.choice(list(driver.logs)))
        lengths = [rng.randint(1, 24) for _ in range(3 - len(driver.logs))]
        for length in lengths:
            driver.start([rng.randrange(3) for _ in range(length)], 6)
        driver.look()
        assert nbytes(driver.cache) <= budget
