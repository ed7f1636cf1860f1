"""Paged storage without windows: pages held, copies on write, undoing, budgets; capacity is asked back by filling."""

from __future__ import annotations

import random

import pytest

from kernels.backend import resolve
from strategies.geometry import CacheFull, Refused
from strategies.paged import Paged
from tests.strategies.driving import Driver, fresh_fits, nbytes, ops, paged, shape

PAGE = 4 * 2 * 4 * 8  # four tokens of K and V in one float64 layer of `shape()`


def small(pages: int, **parameters: object) -> Paged:
    """A cache of `pages` usable pages of 4 tokens."""
    return paged(budget=(pages + 1) * PAGE, page_size=4, **parameters)


def free_pages(driver: Driver) -> int:
    return driver.fits(4)


def test_owned_pages_are_the_length_rounded_up_through_drafts_and_rejections():
    driver = Driver(small(6))
    sid = driver.start([1, 2, 3, 4, 5, 6])
    assert free_pages(driver) == 4
    driver.step({sid: [7, 8, 9]})
    assert free_pages(driver) == 3
    driver.truncate(sid, 7)
    assert free_pages(driver) == 4
    driver.truncate(sid, 4)
    assert free_pages(driver) == 5
    driver.step({sid: [9]})
    assert free_pages(driver) == 4
    driver.look()
    driver.close(sid)
    assert free_pages(driver) == 6


@pytest.mark.parametrize("seed", range(3))
def test_owned_pages_are_the_lengths_rounded_up_after_every_step_of_a_random_life(seed):
    rng = random.Random(seed)
    driver = Driver(small(12))
    for _ in range(60):
        sid = rng.choice(list(driver.logs)) if driver.logs else driver.open()
        act, length = rng.choice(("open", "grow", "grow", "draft", "cut", "close")), len(driver.logs[sid])
        if act == "open":
            driver.open()
        elif act in ("grow", "draft"):
            news = {sid: [rng.randint(1, 90) for _ in range(rng.randint(1, 7))]}
            try:
                driver.step(news)
            except CacheFull as full:
                needed = -(-(length + len(news[sid])) // 4) - -(-length // 4)
                assert full.short_bytes == (needed - free_pages(driver)) * PAGE and full.sids == (sid,)
                driver.close(sid)
                continue
            if act == "draft":
                driver.truncate(sid, rng.randint(length, len(driver.logs[sid])))
        elif act == "cut":
            driver.truncate(sid, rng.randint(0, length))
        else:
            driver.close(sid)
        assert free_pages(driver) == 12 - sum(-(-len(log) // 4) for log in driver.logs.values())
        assert driver.cache.stats().in_use_bytes == PAGE * sum(-(-len(log) // 4) for log in driver.logs.values())
    driver.close()
    assert free_pages(driver) == 12


def test_fork_shares_whole_pages_and_each_writer_copies_the_partial_one():
    driver = Driver(small(8))
    a = driver.start([1, 2, 3, 4, 5, 6])
    b = driver.fork(a)
    assert free_pages(driver) == 6, "a fork takes nothing until it writes"
    for number in range(3):
        driver.step({a: [10 + number]})
        driver.step({b: [20 + number]})
    assert free_pages(driver) == 8 - 5, "one shared page, two pages each"
    driver.look()
    driver.close(a)
    assert free_pages(driver) == 8 - 3
    driver.look()
    driver.close(b)
    assert free_pages(driver) == 8


def test_fork_at_a_page_boundary_copies_nothing():
    driver = Driver(small(8))
    a = driver.start([1] * 8)
    b = driver.fork(a)
    copies = driver.cache.ops.calls["copy_pages"]
    driver.step({a: [2], b: [3]})
    assert driver.cache.ops.calls["copy_pages"] == copies and free_pages(driver) == 4
    driver.look()


def test_writer_alone_copies_once_and_then_writes_in_place():
    driver = Driver(small(8))
    a = driver.start([1, 2])
    b = driver.fork(a)
    driver.step({b: [3]})
    assert driver.cache.ops.calls["copy_pages"] == 1
    driver.step({b: [4]})
    driver.step({a: [5]})
    assert driver.cache.ops.calls["copy_pages"] == 1
    driver.look()


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_abort_restores_pages_that_were_added_and_copied(layers):
    driver = Driver(Paged(shape((None, None)), 9 * 2 * PAGE, ops(), page_size=4))
    a = driver.start([1, 2, 3, 4, 5, 6])
    b = driver.fork(a)
    for _ in range(3):
        driver.abort_after({a: [7] * 6, b: [8] * 3}, layers)
        driver.look()
        assert free_pages(driver) == 6
    driver.step({a: [7] * 6, b: [8] * 3})
    driver.look()
    driver.close(b)
    driver.close(a)
    assert free_pages(driver) == 8


def test_others_may_come_and_go_while_a_plan_is_open():
    driver = Driver(small(10))
    a = driver.start([1, 2, 3, 4, 5, 6])
    b, c = driver.fork(a), driver.fork(a)
    for ending in ("abort", "commit"):
        plan = driver.plan({a: [7, 8]})
        driver.run(plan, {a: [7, 8]})
        child = driver.fork(b)
        driver.truncate(c, 3)
        driver.close(b if ending == "abort" else c)
        driver.cache.abort(plan) if ending == "abort" else driver.commit(plan, {a: [7, 8]})
        driver.look()
        b = child
    driver.close()
    assert free_pages(driver) == 10


def test_full_plan_changes_nothing():
    driver = Driver(small(5))
    a, b = driver.start([1, 2, 3, 4, 5]), driver.start([6, 7])
    c = driver.fork(a)
    before = driver.cache.stats(), [bytes(tensor.numpy()) for tensor in driver.cache.tensors()]
    with pytest.raises(CacheFull) as full:
        driver.plan({b: [1], a: [1] * 9, c: [2]})
    # a: a copy of its second page and two pages more; c: a copy; two pages are free
    assert full.value.short_bytes == 2 * PAGE and set(full.value.sids) == {a, b, c}
    assert before == (driver.cache.stats(), [bytes(tensor.numpy()) for tensor in driver.cache.tensors()])
    assert free_pages(driver) == 2
    driver.look()


def test_pages_that_were_short_are_enough_once_they_are_free():
    driver = Driver(small(5))
    a, b = driver.start([1] * 8), driver.start([2] * 9)
    with pytest.raises(CacheFull) as full:
        driver.step({a: [1] * 9})
    assert full.value.short_bytes == 3 * PAGE
    driver.close(b)
    driver.step({a: [1] * 9})


def test_reused_table_row_leads_nowhere_else():
    driver = Driver(small(12))
    a, c = driver.start([1] * 20), driver.start([3] * 9)
    driver.close(a)
    b = driver.start([2] * 6)
    plan = driver.plan({b: [9], c: [9]})
    (where,) = plan.private.where
    assert where.pages.tolist()[0][2:] == [0], "past its own pages, a table names the scratch page"
    driver.run(plan, {b: [9], c: [9]})
    driver.cache.abort(plan)
    driver.look()


@pytest.mark.parametrize("length", [8, 7, 9, 12])
def test_prompt_pages_keep_their_bytes_while_decoding(length):
    driver = Driver(small(8))
    sid = driver.start([5] * length)
    plan = driver.plan({sid: [1]})
    pages = plan.private.where[0].pages[0].tolist()
    driver.cache.abort(plan)
    keys_values = [store.codes for store in driver.cache._lanes[0].stores[0]]
    rows = [page * 4 + offset for page in pages for offset in range(4)][:length]
    before = [codes[rows].clone() for codes in keys_values]
    for token in range(5):
        driver.step({sid: [token]})
    assert all(bool((codes[rows] == old).all()) for codes, old in zip(keys_values, before, strict=True))


def test_rows_of_the_scratch_page_are_never_written():
    driver = Driver(small(6))
    a = driver.start([1] * 7, 2)
    driver.step({driver.fork(a): [2] * 3, a: [3]})
    assert all(bool(store.codes[:4].isnan().all()) for store in driver.cache._lanes[0].stores[0])


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_size_changes_no_answer(page_size):
    driver = Driver(paged(page_size=page_size))
    a = driver.start(list(range(1, 20)), 5)
    b = driver.fork(a)
    driver.step({a: [3], b: [4, 5, 6]})
    driver.truncate(b, 2)
    driver.step({b: [8] * 17})
    driver.look()


@pytest.mark.parametrize("pages", [1, 2, 7, 40])
def test_budget_is_never_passed_and_never_wasted(pages):
    budget = (pages + 1) * PAGE + PAGE - 1
    cache = paged(budget=budget, page_size=4)
    assert budget - PAGE < nbytes(cache) <= budget
    assert free_pages(Driver(cache)) == pages


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"page_size": 0}, "page_size=0"),
        ({"slack": -1}, "slack=-1"),
        ({"sinks": 2}, "sinks=2 with window=null"),
        ({"window": 0}, "window of 0"),
        ({"window": 3, "sinks": -1}, "sinks=-1"),
        ({"codec_k": "int3"}, "int3.*raw, int8"),
        ({"budget": 2 * PAGE - 1, "page_size": 4}, f"{2 * PAGE - 1} bytes holds no page: the smallest that does is {2 * PAGE} bytes"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(parameters, message):
    with pytest.raises(ValueError, match=message):
        paged(**parameters)


def test_smallest_budget_named_in_a_refusal_is_accepted():
    geometry = shape((None, 3, 5))
    with pytest.raises(Refused) as refusal:
        Paged(geometry, 100, resolve("reference"), page_size=4)
    smallest = int(str(refusal.value).split("smallest that does is ")[1].split(" ")[0])
    with pytest.raises(Refused):
        Paged(geometry, smallest - 1, resolve("reference"), page_size=4)
    assert fresh_fits(lambda: Paged(geometry, smallest, ops(), page_size=4), 1) == 1


def test_live_rows_of_forks_are_counted_once():
    driver = Driver(small(12))
    row = PAGE // 4
    a = driver.start([1] * 6)
    b = driver.fork(a)
    assert driver.cache.stats().live_bytes == 6 * row and driver.cache.stats().in_use_bytes == 2 * PAGE
    driver.step({b: [2]})
    assert driver.cache.stats().live_bytes == (6 + 3) * row, "the copied page holds two old rows and a new one"
    driver.truncate(a, 2)
    assert driver.cache.stats().live_bytes == (4 + 3) * row
    driver.close(b)
    assert driver.cache.stats().live_bytes == 2 * row and driver.cache.stats().in_use_bytes == PAGE
