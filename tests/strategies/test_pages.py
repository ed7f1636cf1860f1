"""The page pool: reference counts, refusals, the order of eviction, and a random life beside a dict of owners."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from strategies.pages import SCRATCH, PagePool


def test_pages_are_distinct_and_never_the_scratch_page():
    pool = PagePool(5)
    pages = pool.take(2) + pool.take(3)
    assert sorted(pages) == [1, 2, 3, 4, 5] and SCRATCH not in pages


def test_taking_more_than_there_is_changes_nothing():
    pool = PagePool(3)
    held = pool.take(1)
    with pytest.raises(ValueError, match="3 pages asked, 2 available"):
        pool.take(3)
    assert pool.available == 2 and pool.owned == 1
    assert sorted(pool.take(2) + held) == [1, 2, 3]


@pytest.mark.parametrize("call", [lambda pool, page: pool.release([page]), lambda pool, page: pool.release([page, page])])
def test_second_free_of_a_page_is_refused_and_invents_no_page(call):
    pool = PagePool(8)
    (page,) = pool.take(1)
    with pytest.raises(ValueError, match="released twice"):
        pool.release([page])
        call(pool, page)
    assert pool.available == 8
    assert len(set(pool.take(8))) == 8


def test_scratch_page_is_never_released_or_shared():
    pool = PagePool(2)
    with pytest.raises(ValueError, match="page 0"):
        pool.release([SCRATCH])
    with pytest.raises(ValueError, match="page 0"):
        pool.share([SCRATCH])


def test_free_page_cannot_be_shared():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.release([page])
    with pytest.raises(ValueError, match="free"):
        pool.share([page])
    assert pool.available == 2


def test_shared_page_stays_until_its_last_owner_leaves():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.share([page])
    pool.share([page])
    assert (pool.refs(page), pool.shared, pool.owned) == (3, 1, 1)
    pool.release([page])
    assert (pool.refs(page), pool.shared) == (2, 1)
    pool.release([page])
    assert (pool.refs(page), pool.shared) == (1, 0)
    pool.release([page])
    assert (pool.owned, pool.available) == (0, 2)


def test_published_page_outlives_its_owner():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.publish(page)
    pool.release([page])
    assert (pool.cached, pool.owned, pool.available) == (1, 0, 2)
    pool.share([page])
    assert (pool.cached, pool.owned, pool.refs(page)) == (0, 1, 1)


def test_cached_pages_go_last_and_oldest_first_each_announced_before_it_is_handed_out():
    gone = []
    pool = PagePool(4, gone.append)
    a, b, c = pool.take(3)
    for page in (a, b, c):
        pool.publish(page)
    pool.release([b])
    pool.release([c])
    pool.release([a])
    pool.share([c])  # back to life, and released again: now the youngest
    pool.release([c])
    first = pool.take(1)
    assert gone == [] and first[0] not in (a, b, c)
    assert pool.take(2) == [b, a] and gone == [b, a]
    assert pool.take(1) == [c] and gone == [b, a, c]


def test_evicted_page_is_an_ordinary_page_again():
    pool = PagePool(1, lambda page: None)
    (page,) = pool.take(1)
    pool.publish(page)
    pool.release([page])
    assert pool.take(1) == [page]
    pool.release([page])
    assert pool.cached == 0 and pool.available == 1


def test_retracted_page_is_announced_once_and_becomes_an_ordinary_page():
    gone = []
    pool = PagePool(2, gone.append)
    a, b = pool.take(2)
    pool.publish(a)
    pool.retract(a)
    pool.retract(a)
    pool.retract(b)
    assert gone == [a]
    pool.release([a])
    assert (pool.cached, pool.available) == (0, 1)


def test_growing_keeps_owners_and_adds_new_ids():
    pool = PagePool(2)
    old = pool.take(2)
    pool.grow(3)
    assert (pool.capacity, pool.available, pool.owned) == (5, 3, 2)
    assert sorted(old + pool.take(3)) == [1, 2, 3, 4, 5]


def test_compacting_keeps_owners_and_loses_cached_pages():
    gone = []
    pool = PagePool(6, gone.append)
    pages = pool.take(5)
    pool.share([pages[4]])
    pool.publish(pages[1])
    pool.publish(pages[2])
    pool.release([pages[0], pages[2], pages[3]])
    moved = pool.compact(3)
    assert moved == {pages[1]: 1, pages[4]: 2} and gone == [pages[2]]
    assert [pool.refs(page) for page in range(4)] == [0, 1, 2, 0]
    assert (pool.capacity, pool.owned, pool.cached, pool.available, pool.shared) == (3, 2, 0, 1, 1)
    assert pool.take(1) == [3]
    pool.release([1])
    assert pool.cached == 1, "it is still published"


def test_pool_cannot_be_smaller_than_what_is_owned():
    pool = PagePool(4)
    pages = pool.take(3)
    with pytest.raises(ValueError, match="3 pages are owned"):
        pool.compact(2)
    assert pool.capacity == 4 and [pool.refs(page) for page in pages] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_random_life_agrees_with_a_dict_of_owners(seed):
    rng = random.Random(seed)
    published: set[int] = set()
    pool = PagePool(6, published.discard)
    owners: dict[int, Counter[int]] = {}  # owner -> its pages, with repeats
    for step in range(300):
        counts = sum(owners.values(), Counter())
        act = rng.choice(("take", "take", "fork", "drop", "drop", "publish", "adopt", "retract", "end"))
        held = [(owner, page) for owner, pages in owners.items() for page in pages]
        if act == "take":
            want = rng.randint(0, 3)
            if want > pool.available:
                with pytest.raises(ValueError):
                    pool.take(want)
            else:
                pages = pool.take(want)
                assert not set(pages) & set(counts), "a page that somebody owns was handed out"
                owners[step] = Counter(pages)
        elif act == "fork" and owners:
            pages = owners[rng.choice(list(owners))]
            pool.share(pages.elements())
            owners[step] = Counter(pages)
        elif act == "drop" and held:
            owner, page = rng.choice(held)
            pool.release([page])
            owners[owner] -= Counter([page])
        elif act == "publish" and held:
            _, page = rng.choice(held)
            pool.publish(page)
            published.add(page)
        elif act == "retract" and held:
            pool.retract(rng.choice(held)[1])
        elif act == "adopt" and published:
            page = rng.choice(sorted(published))
            pool.share([page])
            owners[step] = Counter([page])
        elif act == "end" and owners:
            pool.release(owners.pop(rng.choice(list(owners))).elements())
        counts = sum(owners.values(), Counter())
        cached = published - set(counts)
        assert (pool.owned, pool.cached, pool.available) == (len(counts), len(cached), 6 - len(counts))
        assert pool.shared == sum(count > 1 for count in counts.values())
        assert all(pool.refs(page) == counts[page] for page in range(1, 7))
    for pages in owners.values():
        pool.release(pages.elements())
    assert sorted(pool.take(6)) == [1, 2, 3, 4, 5, 6]
