"""Paged memory without a budget: what the sequences expect, what forks do not share, nothing twice."""

from __future__ import annotations

from tests.strategies.driving import Driver, nbytes, paged

PAGE = 4 * 2 * 4 * 8  # four tokens of K and V in one float64 layer of `shape()`


def test_memory_without_a_budget_is_what_the_sequences_expect():
    driver = Driver(paged(page_size=4))
    a, b = driver.open(expect=9), driver.open(expect=22)
    for at in range(0, 22, 2):
        driver.step({sid: [1] * 2 for sid, most in ((a, 8), (b, 22)) if at < most})
        assert nbytes(driver.cache) == (1 + 3 + 6) * PAGE
    driver.step({a: [2]})
    assert nbytes(driver.cache) == (1 + 3 + 6) * PAGE == driver.cache.bytes_for([9, 22], 2)


def test_forks_without_a_budget_reserve_only_what_they_do_not_share_and_only_once():
    driver = Driver(paged(page_size=4))
    parent = driver.start([1] * 16, expect=24)
    assert nbytes(driver.cache) == 7 * PAGE
    family = [parent, *(driver.fork(parent) for _ in range(3))]
    driver.step({sid: [2] for sid in family})
    assert nbytes(driver.cache) == (7 + 3 * 2) * PAGE, "four whole pages are shared, each fork has two of its own"
    held = [tensor.data_ptr() for tensor in driver.cache.tensors()]
    for token in range(7):
        driver.step({sid: [token] for sid in family})
    assert [tensor.data_ptr() for tensor in driver.cache.tensors()] == held


def test_sequences_that_expect_nothing_are_paid_for_as_they_grow():
    driver = Driver(paged(page_size=4))
    sid = driver.open()
    for length in range(1, 14):
        driver.step({sid: [1]})
        assert nbytes(driver.cache) == (1 + -(-length // 4)) * PAGE
    driver.truncate(sid, 1)
    driver.step({sid: [2] * 12})
    assert nbytes(driver.cache) == 5 * PAGE
    driver.look()


def test_memory_of_an_ended_sequence_serves_the_next_one():
    driver = Driver(paged(page_size=4))
    driver.start([1] * 20, expect=20)
    driver.close()
    driver.start([2] * 12, expect=20)
    assert nbytes(driver.cache) == 6 * PAGE
    driver.look()


def test_other_sequences_keep_their_rows_when_the_pool_is_replaced():
    driver = Driver(paged(page_size=4))
    driver.start([1, 2, 3, 4, 5], expect=6)
    before = [tensor.data_ptr() for tensor in driver.cache.tensors()]
    driver.start([6, 7, 8], expect=40)
    assert [tensor.data_ptr() for tensor in driver.cache.tensors()] != before
    driver.look()
