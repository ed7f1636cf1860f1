"""Allocation: memory that was given back can be used again, and a refusal changes nothing.

Capacity is asked back by filling the cache, never by asking `stats`: a counter that agrees with a leak is worth nothing.
"""

from __future__ import annotations

import numpy as np

from harness.conformance.promise import NotApplicable, promise
from harness.conformance.subject import Subject, stored
from harness.conformance.world import World, budget_for, tokens
from strategies.geometry import CacheFull, Stats


@promise("A", "A04", "A10", "A02")
def capacity_comes_back_after_any_life(subject: Subject) -> None:
    """Grow, fork, cut, abort, close in uneven pieces, twice over: the cache then holds exactly as many sequences as a fresh one."""
    world = _tight(subject, 6)
    length = _unit(subject)
    fresh = world.capacity(length)
    for round_ in range(2):
        sid = world.start(tokens(6), 4, expect=9)
        child = world.fork(sid)
        world.step({child: [1, 2, 3]})
        _cut(world, child, 2)
        plan = world.plan({sid: [4]})
        world.abort(plan)
        world.step({child: [5, 6, 7]})
        _cut(world, child, 1 + round_)
        world.close(sid)
        world.close(world.fork(child))
        world.close(child)
        assert world.cache.stats().in_use_bytes == 0, "memory is in use with no sequence open"
        assert world.capacity(length) == fresh, "closing every sequence does not give all capacity back"


@promise("A", "A04")
def cutting_gives_capacity_back(subject: Subject) -> None:
    """A sequence cut to a few tokens leaves as much room as one that never was longer; asked back by filling."""
    geometry = subject.rewindable(1, head_dim=8)
    facts, length = stored(subject, geometry), _unit(subject)
    long, short = (World(subject, geometry, budget_for(subject, geometry, 4, length)) for _ in range(2))
    back = int(min(facts.rewind, length - 2))
    for world, size in ((long, length), (short, length - back)):
        world.start(tokens(size), expect=size)
    if long.cache.stats().in_use_bytes == short.cache.stats().in_use_bytes:
        raise NotApplicable("gives the same room to both lengths")
    long.truncate(0, length - back)
    if facts.page_size is None:
        long.close(0)
        short.close(0)
    assert long.capacity(2) == short.capacity(2), "the room of tokens that were cut does not come back"


@promise("A", "A01", "C07")
def full_plan_changes_nothing(subject: Subject) -> None:
    """Plans refused for room, alone and in a batch, leave bytes, lengths and every later bit as in a world that never asked."""
    asked, quiet = (_filled(subject) for _ in range(2))
    crowd = [asked.open(expect=_unit(subject)) for _ in range(8)]
    everyone = dict.fromkeys(crowd, _unit(subject))
    for stops in (everyone, {0: len(asked.logs[0]) + 1} | everyone, everyone | {1: len(asked.logs[1]) + 2}):
        before = _state(asked)
        full = _refused(asked, stops)
        assert full.short_bytes > 0, f"CacheFull says {full.short_bytes} bytes are short"
        assert set(full.sids) <= set(stops), f"CacheFull names {full.sids}, {list(stops)} had asked"
        assert _state(asked) == before, "a refused plan changed what the cache says of itself"
    for sid in crowd:
        asked.close(sid)
    for news in ({0: [5]}, {1: [6]}):
        want, got = _step_or_full(quiet, news), _step_or_full(asked, news)
        assert (want is None) == (got is None), "a refused plan changed what fits"
        if want is not None:
            assert all(np.array_equal(a, b) for sid in want for a, b in zip(want[sid], got[sid], strict=True)), (
                "a refused plan changed an answer"
            )
    for world in (asked, quiet):
        world.close_all()
    assert asked.capacity(_unit(subject)) == quiet.capacity(_unit(subject)), "a refused plan cost capacity"


@promise("A", "A01", "A02")
def what_was_short_is_enough(subject: Subject) -> None:
    """After CacheFull, closing the sequences that did not ask makes the same plan succeed, or it could never fit at all."""
    world = _filled(subject)
    length = len(world.logs[0])
    fits = _alone_fits(subject, length + 2)
    _fill_up(world)
    try:
        plan = world.cache.plan({0: length + 2})
    except CacheFull:
        for sid in [sid for sid in world.logs if sid != 0]:
            world.close(sid)
        if not fits:
            raise NotApplicable("one sequence fills the whole budget") from None
        plan = world.cache.plan({0: length + 2})
    world.abort(plan)


@promise("A", "A01")
def what_can_never_fit_is_refused_and_others_go_on(subject: Subject) -> None:
    """A sequence larger than the whole budget is refused each time it asks, at once, and the ones behind it are served."""
    world = _tight(subject, 2)
    if _alone_fits(subject, world.geometry.context):
        raise NotApplicable("one sequence of the whole context fits the budget")
    big, small = world.open(), world.open(expect=5)
    for _ in range(3):
        _refused(world, {big: world.geometry.context})
        if len(world.logs[small]) < 5:
            world.step({small: [len(world.logs[small])]})
    world.close(big)
    world.close(small)


@promise("A", "A10")
def cancel_at_any_moment_leaks_nothing(subject: Subject) -> None:
    """Close an unfed sequence, between chunks, right after an abort, mid-decode, after CacheFull: capacity and the others stay whole."""
    world = _tight(subject, 4)
    fresh, other = world.capacity(_unit(subject)), world.start(tokens(5, 3), expect=9)
    world.close(world.open(tokens(6), expect=12))
    half = world.start(tokens(4), 2, expect=12)
    world.close(half)
    planned = world.open(expect=6)
    world.abort(world.plan({planned: tokens(6), other: [1]}))
    world.close(planned)
    late = world.start(tokens(3), expect=6)
    world.step({late: [1], other: [2]})
    world.close(late)
    crowd = [world.open(expect=_unit(subject)) for _ in range(fresh + 1)]
    _refused(world, dict.fromkeys(crowd, _unit(subject)))
    for sid in crowd:
        world.close(sid)
    world.step({other: [3]})
    world.close(other)
    assert world.capacity(_unit(subject)) == fresh, "a cancelled sequence still holds memory"


@promise("A", "A02", "A07")
def no_memory_is_given_to_two(subject: Subject) -> None:
    """Fill to the brim, free every other sequence, let forks outlive their parents, fill again: all still read their own rows."""
    world = _tight(subject, 6)
    unit, sids = _unit(subject), []
    for round_ in range(3):
        while True:
            sid = world.open(expect=unit)
            try:
                world.step({sid: tokens(unit, len(sids) + round_)})
            except CacheFull:
                world.close(sid)
                break
            sids.append(sid)
        assert len(sids) > 1, "nothing fits beside one sequence"
        for sid in sids[::2]:
            world.close(sid)
        twins = [world.fork(sid) for sid in sids[1::2]]
        for sid in sids[1::2]:
            world.close(sid)
        sids = twins
        if sids:
            _step_or_full(world, {sid: [round_] for sid in sids})


def _tight(subject: Subject, count: int) -> World:
    """A world whose budget is what `count` sequences of a unit reserve."""
    geometry = subject.geometry(head_dim=8, windows=(None, 5))
    stored(subject, geometry)
    return World(subject, geometry, budget_for(subject, geometry, count, _unit(subject)))


def _unit(subject: Subject) -> int:
    facts = subject.facts(subject.geometry(head_dim=8, windows=(None, 5)))
    return max(9, 2 * (facts.page_size or 4) + 1)


def _filled(subject: Subject) -> World:
    world = _tight(subject, 3)
    for number in range(2):
        world.start(tokens(7, number), 4, expect=_unit(subject))
    return world


def _fill_up(world: World) -> None:
    for _ in range(40):
        sid = world.open(expect=3)
        if _step_or_full(world, {sid: [1, 2, 3]}) is None:
            world.close(sid)
            return


def _alone_fits(subject: Subject, length: int) -> bool:
    world = _tight(subject, 3)
    sid = world.open(expect=length)
    return _step_or_full(world, {sid: tokens(length)}) is not None


def _step_or_full(world: World, news: dict[int, list[int]]) -> dict[int, list[np.ndarray]] | None:
    try:
        return world.step(news)
    except CacheFull:
        return None


def _refused(world: World, stops: dict[int, int]) -> CacheFull:
    try:
        plan = world.cache.plan(stops)
    except CacheFull as full:
        world.check()
        return full
    world.abort(plan)
    raise AssertionError(f"a plan up to {stops} was granted within {world.budget} bytes")


def _cut(world: World, sid: int, count: int) -> None:
    count = int(min(count, world.cache.rewind))
    world.truncate(sid, len(world.logs[sid]) - count)


def _state(world: World) -> tuple[Stats, dict[int, int]]:
    return world.cache.stats(), {sid: world.cache.held(sid) for sid in world.logs}
