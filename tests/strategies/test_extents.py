"""Runs of neighbouring rows: first fit, merging, and a prediction that is kept."""

from __future__ import annotations

import random

import pytest

from strategies.extents import Extents


def fragmented(*free: tuple[int, int], size: int = 40) -> Extents:
    """An arena in which exactly these (first, rows) are free."""
    arena = Extents(size)
    arena.take(size)
    for first, rows in free:
        arena.give(first, rows)
    return arena


def test_the_first_run_that_is_long_enough_is_used():
    arena = fragmented((2, 3), (10, 8), (25, 5))
    assert arena.take(4) == 10
    assert arena.take(3) == 2
    assert arena.take(5) == 25
    assert arena.take(5) is None and arena.free == 4


def test_refused_run_changes_nothing():
    arena = fragmented((2, 3), (10, 4))
    assert arena.take(5) is None
    assert (arena.take(4), arena.take(3), arena.free) == (10, 2, 0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_merge_in_whatever_order_they_come_back(order):
    arena = Extents(12)
    firsts = [arena.take(4) for _ in range(3)]
    for which in order:
        arena.give(firsts[which], 4)
    assert arena.take(12) == 0


@pytest.mark.parametrize(("first", "rows"), [(4, 4), (5, 1), (2, 3), (7, 4), (0, 12)])
def test_rows_that_are_free_cannot_be_given_back(first, rows):
    arena = fragmented((4, 4), size=12)
    with pytest.raises(ValueError, match="given back twice"):
        arena.give(first, rows)
    assert arena.free == 4


def test_empty_arena_gives_nothing():
    arena = Extents(0)
    assert arena.free == 0 and arena.take(1) is None and arena.missing([3, 2]) == 5


def test_missing_counts_the_rows_of_runs_that_find_no_place():
    arena = fragmented((0, 4), (10, 6))
    assert arena.missing([6, 4]) == 0
    assert arena.missing([4, 6]) == 0
    assert arena.missing([7]) == 1
    assert arena.missing([5, 5]) == 1
    assert arena.missing([6, 4, 3]) == 3


def test_a_fitting_order_says_nothing_of_another_order():
    arena = fragmented((0, 6), (10, 4))
    assert arena.missing([6, 4]) == 0
    assert arena.missing([4, 6]) == 2


@pytest.mark.parametrize("seed", range(8))
def test_missing_is_zero_exactly_when_taking_in_that_order_succeeds(seed):
    rng = random.Random(seed)
    arena, runs, size = Extents(30), [], 30
    for _ in range(300):
        wanted = [rng.randint(1, 9) for _ in range(rng.randint(1, 4))]
        before, short = arena.free, arena.missing(wanted)
        assert arena.free == before, "asking changed the arena"
        placed = []
        for rows in wanted:
            first = arena.take(rows)
            if first is None:
                break
            placed.append((first, rows))
        assert (len(placed) == len(wanted)) == (short == 0)
        runs += placed
        taken = sorted(row for first, rows in runs for row in range(first, first + rows))
        assert len(set(taken)) == len(taken) and all(0 <= row < size for row in taken), "two runs share a row"
        assert arena.free == size - len(taken)
        rng.shuffle(runs)
        while len(runs) > 3:
            arena.give(*runs.pop())
    for run in runs:
        arena.give(*run)
    assert arena.take(size) == 0


def test_a_run_grows_only_over_rows_that_are_free_right_behind_it():
    arena = Extents(10)
    assert arena.take(4) == 0 and arena.take(2) == 4
    assert not arena.extend(4, 1), "row 4 is taken"
    assert not arena.extend(7, 1), "row 6 is free, so row 7 does not begin a run"
    assert not arena.extend(6, 5), "only 4 rows are left"
    assert arena.extend(6, 3) and arena.free == 1
    arena.give(4, 2)
    assert arena.extend(4, 2) and arena.free == 1
