"""A run that doubles under a budget: in place where it can, so that what the formula bills is enough."""

from __future__ import annotations

import pytest

from strategies.geometry import CacheFull
from tests.strategies.driving import Driver
from tests.strategies.test_contiguous import ROW, contiguous


def test_one_growing_sequence_fits_the_bytes_that_it_is_billed():
    driver = Driver(contiguous(rows=64, slab="growth"))
    assert driver.cache.bytes_for([60]) == 64 * ROW
    sid = driver.start(list(range(10)))
    held = [tensor.data_ptr() for tensor in driver.cache.tensors()]
    for token in range(50):
        driver.step({sid: [token]})
    assert driver.cache.held(sid) == 60
    assert [tensor.data_ptr() for tensor in driver.cache.tensors()] == held


def test_an_aborted_growth_gives_the_rows_behind_back():
    driver = Driver(contiguous(rows=48, slab="growth"))
    sid = driver.start(list(range(16)))
    plan = driver.plan({sid: [1]})
    driver.cache.abort(plan)
    other = driver.start(list(range(16)))  # needs the rows that the growth had taken
    assert driver.cache.stats().in_use_bytes == 32 * ROW
    with pytest.raises(CacheFull):
        driver.plan({sid: [1]})
    driver.step({other: [2]})
    assert driver.cache.held(other) == 17
