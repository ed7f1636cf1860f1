"""What every storage's plan promises: the integers, the order of calls, and that a context costs nothing to plan."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from kernels.backend import resolve
from strategies.base import KVCache
from strategies.contiguous import Contiguous
from strategies.geometry import CacheFull
from strategies.kivi import Kivi
from strategies.none import NoCache
from strategies.paged import Paged
from strategies.registry import STORAGES
from tests.strategies.driving import Driver, coarse_value, ops, shape

MAKERS = {
    "none": lambda geometry, backend: NoCache(geometry, None, backend),
    "contiguous": lambda geometry, backend: Contiguous(geometry, None, backend),
    "paged": lambda geometry, backend: Paged(geometry, None, backend, page_size=4),
    "kivi": lambda geometry, backend: Kivi(geometry, None, backend, group=4, residual=4, slack=64),
}


@pytest.fixture(params=MAKERS)
def cache(request) -> KVCache:
    return MAKERS[request.param](shape(), ops())


def drive(cache: KVCache, stops: dict[int, int]) -> None:
    """One step whose answers do not matter."""
    plan = cache.plan(stops)
    rows = int(plan.cu_seqlens[-1])
    q, k = torch.zeros(rows, 3, 4, dtype=cache.dtype), torch.zeros(rows, 1, 4, dtype=cache.dtype)
    cache.attend(0, q, k, k, plan)
    cache.commit(plan, [0] * rows)


def test_every_storage_is_tried_here():
    assert set(MAKERS) == set(STORAGES)


def test_integers_of_a_plan_agree_with_a_plain_loop(cache):
    a, b, c = (cache.open(expect=12) for _ in range(3))
    for stops in ({a: 3}, {b: 5, a: 4}, {c: 1, a: 9, b: 6}, {b: 12, c: 2}):
        plan = cache.plan(stops)
        positions, ends, spans = [], [0], []
        for sid, stop in stops.items():
            spans.append((sid, cache.held(sid), stop))
            positions += range(cache.held(sid), stop)
            ends.append(len(positions))
        assert plan.spans == tuple(spans)
        assert plan.positions.tolist() == positions and plan.positions.dtype == torch.int64
        assert plan.cu_seqlens.tolist() == ends and plan.cu_seqlens.dtype == torch.int32
        assert plan.logit_rows.tolist() == [end - 1 for end in ends[1:]] and plan.logit_rows.dtype == torch.int64
        assert plan.batch.spans == tuple((start, stop) for _, start, stop in spans)
        assert plan.batch.starts.tolist() == [start for _, start, _ in spans] and plan.batch.tokens == len(positions)
        cache.abort(plan)
        drive(cache, stops)


def test_feeding_advances_held_and_no_cache_holds_nothing(cache):
    sid = cache.open()
    drive(cache, {sid: 5})
    assert cache.held(sid) == (0 if isinstance(cache, NoCache) else 5)
    assert cache.plan({sid: 6}).spans == ((sid, cache.held(sid), 6),)


@pytest.mark.parametrize("stop", [5, 4, 0, -1])
def test_stop_that_feeds_nothing_is_refused(cache, stop):
    sid = cache.open()
    drive(cache, {sid: 5})
    with pytest.raises(ValueError, match=f"sequence {sid} holds 5 tokens.*not {stop}"):
        cache.plan({sid: stop})
    drive(cache, {sid: 6})


def test_stop_past_the_context_is_refused(cache):
    sid = cache.open()
    with pytest.raises(ValueError, match="cannot reach 65 tokens: the context is 64"):
        cache.plan({sid: 65})
    drive(cache, {sid: 64})


def test_one_bad_span_leaves_the_good_one_unplanned(cache):
    good, bad = cache.open(), cache.open()
    with pytest.raises(ValueError, match=f"sequence {bad}"):
        cache.plan({good: 4, bad: 0})
    drive(cache, {good: 4, bad: 1})


def test_empty_plan_is_refused(cache):
    with pytest.raises(ValueError, match="nothing to plan"):
        cache.plan({})


def test_second_plan_waits_for_the_first_to_end(cache):
    sid, other = cache.open(), cache.open()
    plan = cache.plan({sid: 3})
    with pytest.raises(RuntimeError, match="a plan is already open"):
        cache.plan({other: 1})
    cache.abort(plan)
    drive(cache, {other: 1, sid: 3})


def test_planned_sequence_cannot_be_forked_cut_or_closed(cache):
    sid = cache.open()
    drive(cache, {sid: 3})
    plan = cache.plan({sid: 5})
    for call in (cache.fork, cache.close, lambda sid: cache.truncate(sid, 1)):
        with pytest.raises(RuntimeError, match=f"sequence {sid} is part of an open plan"):
            call(sid)
    cache.abort(plan)
    cache.close(cache.fork(sid))


def test_abort_is_always_legal_and_ends_nothing_but_its_own_plan(cache):
    sid = cache.open()
    old = cache.plan({sid: 3})
    cache.abort(old)
    cache.abort(old)
    plan = cache.plan({sid: 2})
    cache.abort(old)
    with pytest.raises(RuntimeError, match="not open"):
        cache.commit(old, [0] * 3)
    cache.abort(plan)
    drive(cache, {sid: 3})
    done = cache.plan({sid: 4})
    cache.attend(0, torch.zeros(*done.positions.shape, 3, 4).double(), *(torch.zeros(*done.positions.shape, 1, 4).double(),) * 2, done)
    cache.commit(done, [0] * len(done.positions))
    cache.abort(done)
    with pytest.raises(ValueError, match="holds 4 tokens"):
        cache.plan({sid: 4})


def test_commit_with_the_wrong_number_of_tokens_leaves_the_plan_open(cache):
    sid = cache.open()
    plan = cache.plan({sid: 3})
    with pytest.raises(ValueError, match="feeds 3 tokens but 2"):
        cache.commit(plan, [0, 0])
    with pytest.raises(RuntimeError, match="already open"):
        cache.plan({sid: 4})
    cache.abort(plan)
    drive(cache, {sid: 3})


def test_closed_and_unknown_sequences_are_named(cache):
    sid = cache.open()
    cache.close(sid)
    for call in (cache.held, cache.fork, cache.close, lambda sid: cache.truncate(sid, 0), lambda sid: cache.plan({sid: 1})):
        with pytest.raises(KeyError, match=f"no sequence {sid}"):
            call(sid)


def test_sequence_ids_are_never_used_again(cache):
    seen = []
    for _ in range(4):
        sid = cache.open()
        drive(cache, {sid: 2})
        seen += [sid, cache.fork(sid)]
        for each in seen[-2:]:
            cache.close(each)
    assert len(set(seen)) == 8


@pytest.mark.parametrize("length", [-1, 4, 100])
def test_cutting_outside_the_history_is_refused(cache, length):
    sid = cache.open()
    drive(cache, {sid: 3})
    with pytest.raises(ValueError, match=f"sequence {sid} has 3 tokens: cannot truncate it to {length}"):
        cache.truncate(sid, length)
    cache.truncate(sid, 3)
    cache.truncate(sid, 0)
    drive(cache, {sid: 1})


def test_histories_survive_any_mix_of_steps(cache):
    driver = Driver(cache, coarse_value)
    a = driver.start([1, 2, 3, 4, 5, 6, 7], 3)
    b = driver.fork(a)
    driver.step({b: [9], a: [8, 8]})
    driver.truncate(a, 6)
    driver.abort_after({a: [1, 2, 3], b: [4]})
    driver.step({a: [5, 5, 5]})
    driver.look()
    driver.close(b)
    driver.look()


def calls_of(cache: KVCache, stops: dict[int, int]) -> int:
    """Python and C calls that planning makes."""
    count = 0

    def tick(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    collecting = gc.isenabled()
    gc.disable()  # a collection in between would call whoever listens to collections
    sys.setprofile(tick)
    try:
        plan = cache.plan(stops)
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
    cache.abort(plan)
    return count


@pytest.mark.parametrize("kind", ["contiguous", "paged", "window", "none", "kivi"])
def test_planning_64_sequences_costs_the_same_work_whatever_they_hold(kind):
    work = []
    for length in (128, 8192):
        geometry = shape((None, 16), dtype="float16", context=8320)
        if kind in ("paged", "window"):
            cache = Paged(geometry, None, resolve("reference"), window=16 if kind == "window" else None)
        elif kind == "kivi":
            cache = Kivi(shape(dtype="float16", context=8320), None, resolve("reference"), group=32, residual=32)
        else:
            cache = MAKERS[kind](geometry, resolve("reference"))
        sids = [cache.open(expect=length + 2) for _ in range(64)]
        plan = cache.plan(dict.fromkeys(sids, length))
        cache.commit(plan, range(64 * length))
        cache.abort(cache.plan(dict.fromkeys(sids, length + 1)))  # tables have their width now
        work.append(calls_of(cache, dict.fromkeys(sids, length + 1)))
    assert work[0] == work[1]
    assert work[0] < 64 * 80, "planning one sequence takes more than a few dozen calls"


def test_a_refused_plan_leaves_no_plan_open():
    cache = Paged(shape(), 4 * 8 * 4 * 2 * 2, ops(), page_size=4)
    sid = cache.open()
    with pytest.raises(CacheFull):
        cache.plan({sid: 60})
    drive(cache, {sid: 1})
