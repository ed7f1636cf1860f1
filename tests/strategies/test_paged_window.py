"""Paged storage with windows: memory is bounded, rewinding reaches exactly as far as promised, sinks stay, refusals change nothing."""

from __future__ import annotations

import pytest

from strategies.geometry import CacheFull, CannotRewind
from strategies.paged import Paged
from tests.strategies.driving import Driver, ops, paged, shape

PAGE = 2 * 4 * 8  # one token of K and V in one float64 layer of `shape()`, times page_size


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 0), (8, 3), (3, 9)])
@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_memory_is_bounded_by_window_chunk_slack_and_sinks(page_size, window, sinks, slack):
    for chunk in (1, 6):
        driver = Driver(paged(window=window, sinks=sinks, slack=slack, page_size=page_size))
        sid, most = driver.open(), 0
        for at in range(0, 60, chunk):
            news = {sid: [at] * chunk}
            driver.commit(driver.plan(news), news)
            most = max(most, driver.cache.stats().in_use_bytes // (PAGE * page_size))
        rows = window - 1 + slack  # kept between steps, whatever the alignment
        assert most <= -(-rows // page_size) + 1 + -(-sinks // page_size)
        assert most >= min(rows, 60) // page_size


def test_pages_that_slid_out_serve_other_sequences():
    driver = Driver(paged(window=4, page_size=2, budget=13 * 2 * PAGE))
    sids = [driver.open() for _ in range(3)]
    for at in range(30):
        driver.step({sid: [at] for sid in sids})
    assert driver.fits(2) == 12 - 3 * 2
    driver.look()
    driver.close()
    assert driver.fits(2) == 12


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("slack", [1, 5])
@pytest.mark.parametrize("page_size", [1, 4])
def test_rewinding_by_ones_is_possible_to_the_promised_depth_with_a_fork_at_each_stop(page_size, slack, window, sinks):
    for length in (18,):
        driver = Driver(paged(window=window, sinks=sinks, slack=slack, page_size=page_size))
        sid = driver.start([1 + n % 40 for n in range(length)], 3)
        assert driver.cache.rewind == slack
        for back in range(1, slack + 1):
            driver.truncate(sid, length - back)
            child = driver.fork(sid)
            driver.look()
            driver.step({child: [60] * 4})
            driver.close(child)
        driver.step({sid: [50] * 6})
        driver.look()


def test_rewind_counts_from_the_longest_length_ever():
    driver = Driver(paged(window=4, slack=4, page_size=1))
    sid = driver.start(list(range(1, 21)), 5)
    driver.truncate(sid, 18)
    driver.step({sid: [7]})
    child = driver.fork(sid)
    driver.truncate(child, 16)
    driver.look()
    with pytest.raises(CannotRewind, match="slack=4 allows 16 and above"):
        driver.truncate(sid, 15)
    driver.truncate(sid, 16)
    driver.look()


def test_cannot_rewind_names_the_limit_and_changes_nothing():
    driver = Driver(Paged(shape((None, 4)), None, ops(), page_size=2, slack=1))
    sid = driver.start(list(range(1, 21)))
    child = driver.fork(sid)
    before = driver.cache.stats()
    for length in (8, 12, 1):
        with pytest.raises(CannotRewind, match=f"sequence {sid} cannot go back to {length} tokens.*slack=1 allows 19 and above"):
            driver.truncate(sid, length)
        assert driver.cache.held(sid) == 20 and driver.cache.stats() == before
    driver.look()
    driver.truncate(sid, 19)
    driver.step({sid: [5] * 3, child: [6]})
    driver.look()


def test_going_back_to_nothing_is_always_possible():
    driver = Driver(paged(window=3, page_size=2, budget=9 * 2 * PAGE))
    sid = driver.start(list(range(1, 21)), 4)
    driver.truncate(sid, 0)
    assert driver.fits(2) == 8
    driver.feed(sid, [9, 8, 7, 6, 5])
    driver.look()


def test_cache_that_drops_nothing_rewinds_any_distance():
    driver = Driver(paged(page_size=4))
    assert driver.cache.rewind == float("inf")
    sid = driver.start(list(range(1, 30)))
    driver.truncate(sid, 2)
    driver.look()


def test_sink_pages_stay_for_good_and_the_rest_goes():
    driver = Driver(paged(window=3, sinks=5, page_size=2, budget=20 * 2 * PAGE))
    sid = driver.start(list(range(1, 40)), 2)
    plan = driver.plan({sid: [1]})
    pages = plan.private.where[0].pages[0].tolist()
    driver.cache.abort(plan)
    assert all(pages[:3]) and not any(pages[3:18]) and all(pages[18:])
    driver.look()


def test_a_fork_keeps_pages_that_its_parent_lets_go():
    driver = Driver(paged(window=4, page_size=2, budget=20 * 2 * PAGE))
    parent = driver.start(list(range(1, 9)))
    child = driver.fork(parent)
    driver.feed(parent, list(range(10, 25)), 3)
    driver.look()
    driver.feed(child, list(range(30, 45)), 2)
    driver.look()
    driver.close()
    assert driver.fits(2) == 19


def test_full_plan_drops_no_page_of_the_window():
    driver = Driver(paged(window=6, page_size=2, budget=9 * 2 * PAGE))
    a, b = driver.start(list(range(1, 12))), driver.start([40, 41, 42])
    for _ in range(2):
        with pytest.raises(CacheFull):
            driver.plan({a: [1] * 9, b: [2] * 4})
        driver.look()
    driver.step({a: [1]})


def test_aborted_chunk_larger_than_the_window_loses_no_key():
    driver = Driver(paged(window=4, page_size=2))
    sid = driver.start([1, 2, 3, 4, 5, 6, 7])
    for _ in range(2):
        driver.abort_after({sid: list(range(10, 22))})
        driver.look()
    driver.step({sid: list(range(10, 22))})
    driver.look()


def test_layers_with_different_windows_agree_on_length_and_share_one_refusal():
    driver = Driver(Paged(shape((4, None, 9, 4)), None, ops(), page_size=2))
    assert len(driver.cache._lanes) == 3
    sid = driver.start(list(range(1, 11)), 6)
    assert driver.cache.held(sid) == 10
    driver.step({sid: [1, 2, 3]})
    assert driver.cache.held(sid) == 13
    driver.look()
