"""Prefix reuse: tokens decide, only written pages are found, evicted ones are not, and answers are those of a run without it."""

from __future__ import annotations

import random

import pytest

from strategies.geometry import CacheFull, CannotRewind
from strategies.paged import Paged
from tests.strategies.driving import Driver, fresh_fits, ops, paged, shape

PAGE = 4 * 2 * 4 * 8  # four tokens of K and V in one float64 layer of `shape()`
ONE_HASH = 2**61 - 1  # its multiples all hash to 0: CPython's integer hash is a remainder by it


def reusing(pages: int = 40, **parameters: object) -> Driver:
    return Driver(paged(budget=(pages + 1) * PAGE, page_size=4, prefix=True, **parameters))


@pytest.mark.parametrize(("length", "held"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_whole_pages_are_adopted_and_the_last_token_is_always_fed(length, held):
    driver, prompt = reusing(), list(range(1, length + 1))
    driver.close(driver.start(prompt))
    for _ in range(2):
        sid = driver.open(prompt)
        assert driver.cache.held(sid) == held
        driver.feed(sid, prompt[held:])
        driver.look()
        driver.close(sid)
    longer = driver.open([*prompt, 70, 71])
    assert driver.cache.held(longer) == length // 4 * 4


def test_running_sequence_lends_its_pages_too():
    driver, prompt = reusing(8), list(range(1, 10))
    first = driver.start(prompt)
    second = driver.start(prompt)
    assert driver.cache.stats().in_use_bytes == 4 * PAGE, "two shared pages, a tail each"
    driver.step({first: [50], second: [60]})
    driver.look()
    driver.close(first)
    driver.look()


def test_tokens_with_one_hash_share_nothing():
    driver = reusing()
    a = [ONE_HASH * n for n in range(1, 10)]
    b = [ONE_HASH * n for n in range(11, 20)]
    assert len({hash(token) for token in a + b}) == 1
    for prompt in (a, b):
        sid = driver.open(prompt)
        assert driver.cache.held(sid) == 0
        plan = driver.plan({sid: prompt})
        driver.commit(plan, {sid: prompt})
    assert [driver.cache.held(driver.cache.open(prompt)) for prompt in (a, b, [*a[:4], *b[4:]])] == [8, 8, 4]


def test_equal_page_after_a_different_one_is_not_shared():
    driver = reusing()
    driver.start([9, 9, 9, 9, 1, 2, 3, 4, 5])
    for prompt, held in (([1, 2, 3, 4, 5], 0), ([8, 8, 8, 8, 1, 2, 3, 4, 5], 0), ([9, 9, 9, 9, 1, 2, 3, 5, 5], 4)):
        sid = driver.start(prompt)
        assert driver.cache.held(sid) == len(prompt)
        assert driver.cache.held(driver.cache.open([*prompt[: held + 1]])) == held
    driver.look()


@pytest.mark.parametrize("chunks", [0, 1], ids=["before any step", "after one chunk"])
def test_what_was_never_written_is_never_found(chunks):
    driver, prompt = reusing(), list(range(1, 9))
    sid = driver.open(prompt)
    driver.feed(sid, prompt[: 4 * chunks])
    plan = driver.plan({sid: prompt[4 * chunks :]})
    driver.cache.abort(plan)
    driver.close(sid)
    again = driver.open([*prompt, 9])
    assert driver.cache.held(again) == 4 * chunks
    driver.feed(again, prompt[4 * chunks :])
    driver.look()


def test_rejected_draft_makes_room_for_what_replaces_it_and_takes_no_copy():
    driver = reusing(3)
    sid = driver.start([1, 2, 3, 4, 5])
    driver.step({sid: [60, 61, 62, 63]})
    driver.truncate(sid, 6)
    driver.step({sid: [7, 8, 9]})
    driver.look()
    held = driver.cache.held
    assert driver.cache.ops.calls["copy_pages"] == 0
    assert held(driver.cache.open([1, 2, 3, 4, 5, 60, 7, 8, 9])) == 8
    assert held(driver.cache.open([1, 2, 3, 4, 5, 60, 61, 62, 63])) == 4


def test_cut_page_that_others_read_is_copied_and_stays_findable():
    driver, prompt = reusing(), list(range(1, 10))
    owner, reader = driver.start(prompt), driver.start(prompt)
    driver.truncate(owner, 6)
    driver.step({owner: [50, 51, 52]})
    driver.look()
    driver.close(reader)
    assert [driver.cache.held(driver.cache.open(tokens)) for tokens in (prompt, [*prompt[:6], 50, 51, 52])] == [8, 8]


def test_aborted_rewrite_of_a_cut_page_leaves_nothing_findable_that_was_overwritten():
    driver, prompt = reusing(), list(range(1, 10))
    owner = driver.start(prompt)
    driver.truncate(owner, 6)
    driver.abort_after({owner: [50, 51, 52]})
    reader = driver.start(prompt)
    driver.look()
    driver.step({owner: prompt[6:], reader: [70]})
    driver.look()


def test_what_is_found_again_was_not_overwritten():
    driver, prompt = reusing(), list(range(1, 10))
    owner = driver.start(prompt)
    driver.truncate(owner, 6)
    driver.step({owner: [50, 51, 52]})
    child = driver.fork(owner)
    driver.truncate(child, 2)
    driver.step({child: [60] * 5})
    reader = driver.start(prompt)
    driver.look()
    assert driver.logs[reader] == prompt


def test_evicted_pages_are_not_found_while_somebody_else_writes_to_them():
    driver = reusing(3)
    a = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    driver.close(driver.start(a))
    assert driver.cache.stats().cached_bytes == 2 * PAGE
    b = driver.start([20 + n for n in range(12)])
    with pytest.raises(CacheFull):
        driver.start(a)
    assert driver.cache.held(max(driver.logs)) == 0
    driver.truncate(b, 11)
    driver.look_at(b)
    driver.close()
    assert driver.fits(4) == 3


def test_cached_pages_make_room_deepest_first_and_count_as_free():
    driver, prompt = reusing(4), list(range(1, 14))
    driver.close(driver.start(prompt))
    assert driver.cache.stats().cached_bytes == 3 * PAGE and driver.cache.stats().in_use_bytes == 0
    driver.close(driver.start([90, 91, 92, 93, 94]))  # takes the free page and the deepest cached one
    assert driver.cache.held(driver.cache.open(prompt)) == 8
    assert driver.fits(8, 3) == 1


def test_pages_given_back_twice_over_are_published_once():
    driver, prompt = reusing(8), list(range(1, 10))
    together = [driver.open(prompt) for _ in range(2)]
    driver.step(dict.fromkeys(together, prompt))
    driver.close()
    assert driver.cache.stats().cached_bytes == 2 * PAGE, "the second copy of each page is simply free"
    assert driver.fits(4) == 8


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("windows", [(4, None), (4,), (None, 6, 4)], ids=str)
def test_the_same_prompt_four_times_answers_the_same_with_windows(windows, slack):
    prompt = [3 + n % 11 for n in range(14)]
    driver = Driver(Paged(shape(windows), 90 * PAGE, ops(), page_size=2, prefix=True, slack=slack))
    for number in range(4):
        sid = driver.open(prompt)
        assert driver.cache.held(sid) == (0 if number == 0 else 12)
        driver.feed(sid, prompt[driver.cache.held(sid) :])
        for token in range(6):
            driver.step({sid: [token]})
        for _ in range(slack):
            driver.truncate(sid, len(driver.logs[sid]) - 1)
            driver.look()
        driver.close(sid)


def test_adopted_sequence_rewinds_as_far_as_its_slack():
    driver = reusing(window=4, slack=5)
    prompt = list(range(1, 22))
    driver.close(driver.start(prompt))
    sid = driver.open(prompt)
    assert driver.cache.held(sid) == 20
    driver.truncate(sid, 15)
    driver.step({sid: [50, 51]})
    driver.look()


def test_window_pages_are_found_though_the_beginning_is_forgotten():
    driver = reusing(6, window=4)
    prompt = list(range(1, 18))
    driver.close(driver.start(prompt, 4))
    other = driver.start([40, 41, 42, 43, 44, 45, 46, 47])  # takes free pages and the oldest cached ones: the beginning
    sid = driver.open(prompt)
    assert driver.cache.held(sid) == 16
    driver.feed(sid, prompt[16:])
    driver.look()
    driver.close(other, sid)


def test_page_that_one_window_lost_is_not_adopted_for_another():
    driver = Driver(Paged(shape((None, 4)), 60 * PAGE, ops(), page_size=4, prefix=True))
    prompt = list(range(1, 30))
    sid = driver.start(prompt, 4)
    branch = driver.start(prompt[:11])
    assert driver.logs[branch] == prompt[:11]
    driver.look()
    driver.close(sid)
    driver.look()


def test_index_is_empty_once_its_pages_are_used_for_something_else():
    driver = reusing(6)
    rng = random.Random(1)
    for _ in range(30):
        prompt = [rng.randint(1, 3) for _ in range(rng.randint(4, 20))]
        news = {driver.open(prompt): prompt}
        news = {sid: prompt[driver.cache.held(sid) :] for sid in news}
        driver.commit(driver.plan(news), news)
        driver.close()
        assert len(driver.cache._index._homes) == driver.cache.stats().cached_bytes // PAGE
        assert len(driver.cache._index._nodes) <= 6


@pytest.mark.parametrize("windows", [(None,), (None, 5), (5,)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_random_life_under_pressure_answers_as_if_nothing_were_shared(windows, seed):
    rng = random.Random(seed)

    def make() -> Paged:
        return Paged(shape(windows, context=40), 14 * 2 * PAGE, ops(), page_size=4, prefix=True, slack=2)

    driver, adopted = Driver(make()), 0
    for _ in range(50):
        sids = list(driver.logs)
        act = rng.choice(("open", "open", "step", "step", "abort", "fork", "cut", "close"))
        try:
            if act == "open" or not sids:
                prompt = [rng.randrange(2)] * 8 + [rng.randrange(2) for _ in range(rng.randint(1, 7))]
                sid = driver.open(prompt, expect=rng.choice((None, 20)))
                adopted += driver.cache.held(sid)
                driver.feed(sid, prompt[driver.cache.held(sid) :], rng.randint(1, 9))
            elif act in ("step", "abort"):
                news = {sid: [rng.randrange(3)] * rng.randint(1, 5) for sid in rng.sample(sids, min(2, len(sids)))}
                news = {sid: new for sid, new in news.items() if len(driver.logs[sid]) + len(new) <= 40}
                if news:
                    driver.step(news) if act == "step" else driver.abort_after(news, rng.randint(0, len(windows)))
            elif act == "fork":
                driver.fork(rng.choice(sids))
            elif act == "cut":
                sid = rng.choice(sids)
                driver.truncate(sid, max(0, len(driver.logs[sid]) - rng.randint(0, 2)) if driver.logs[sid] else 0)
            else:
                driver.close(rng.choice(sids))
        except CacheFull:
            driver.close(min(driver.logs))
        except CannotRewind:
            driver.look()
    assert adopted, "nothing was ever adopted"
    driver.close()
    assert driver.fits(8) == fresh_fits(make, 8)
