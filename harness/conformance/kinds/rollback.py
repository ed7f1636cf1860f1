"""Rollback, fork, abort: after any script the cache is what a fresh one would be after the tokens that survived.

The shadow holds the surviving rows, so every later answer is the check. A refusal must come before any change.
"""

from __future__ import annotations

import numpy as np

from harness.conformance.poison import Planted
from harness.conformance.promise import NotApplicable, promise
from harness.conformance.subject import Subject, stored
from harness.conformance.world import World, budget_for, tokens
from strategies.geometry import CannotRewind, Geometry


@promise("R", "R01", "P08")
def rewind_by_ones_with_a_fork_at_each_stop(subject: Subject) -> None:
    """Step back one token at a time as far as promised; at each stop a child is forked, and all of them go on differently."""
    geometry = subject.rewindable(1, windows=(4, None))
    facts = subject.facts(geometry)
    for length in sorted({facts.reach + 2, facts.reach + 3}):
        world = World(subject, geometry)
        sid = world.start(tokens(length), 4, expect=length + 2)
        child = world.fork(sid)
        for back in range(1, int(min(facts.rewind, 9)) + 1):
            world.truncate(sid, length - back)
            elder, child = child, world.fork(sid)
            world.step({child: [back], sid: tokens(back, 1), elder: [back + 1]})
            world.close(elder)


@promise("R", "R01")
def cut_to_any_length_equals_a_fresh_run(subject: Subject) -> None:
    """Cut to every length within reach and go on: the outputs are those of a fresh cache fed the surviving tokens."""
    geometry = subject.rewindable(1, heads=(4, 1), head_dim=8)
    facts = subject.facts(geometry)
    length = facts.reach + 1
    reach = int(min(facts.rewind, length, 9))
    for target in range(length - reach, length):
        cut, fresh = World(subject, geometry), World(subject, geometry, shadowed=False)
        sid = cut.start(tokens(length), 3)
        cut.truncate(sid, target)
        other = fresh.start(tokens(length)[:target], 3) if target else fresh.open()
        for got, want in zip(cut.feed_on(sid, tokens(4, 1), 1), fresh.feed_on(other, tokens(4, 1), 1), strict=True):
            assert np.abs(got - want).max() < 1e-9, f"cut to {target} tokens, the sequence differs from one that never was longer"


@promise("R", "R01")
def impossible_lengths_are_refused_unchanged(subject: Subject) -> None:
    """Negative or larger lengths raise ValueError, the present length changes nothing, and the sequence goes on."""
    world = World(subject, subject.geometry())
    sid = world.start(tokens(7))
    for length in (-1, 8, 100):
        try:
            world.cache.truncate(sid, length)
        except ValueError:
            continue
        raise AssertionError(f"a sequence of 7 tokens was truncated to {length}")
    world.truncate(sid, 7)
    world.feed_on(sid, tokens(3, 1), 1)


@promise("R", "R02", "R07", "Q11")
def forks_share_until_they_write(subject: Subject) -> None:
    """Forks at every offset inside a page, children of children, different tokens interleaved; closing one leaves the others whole."""
    geometry = subject.geometry()
    facts = subject.facts(geometry)
    page = min(facts.page_size or 4, 6)
    for length in range(facts.reach, facts.reach + page):
        world = World(subject, geometry)
        parent = world.start(tokens(length), 5)
        child = world.fork(parent)
        for step in range(3):
            world.step({child: [20 + step], parent: [30 + step]})
        grandchild = world.fork(child)
        world.step({child: [40, 41], grandchild: [50]})
        world.close(child)
        world.step({parent: [60], grandchild: [70, 71]})
        world.close(parent)
        world.feed_on(grandchild, tokens(5, 8), 1)


@promise("R", "R04", "R07")
def beams_are_reordered_by_fork_and_close(subject: Subject) -> None:
    """Four rounds of three beams: each round two of them descend from the same parent, the loser is closed."""
    world = World(subject, subject.geometry())
    beams = [world.start(tokens(6), 4)]
    beams += [world.fork(beams[0]), world.fork(beams[0])]
    for round_ in range(4):
        world.step({sid: [10 * lane + round_] for lane, sid in enumerate(beams)})
        best, other, loser = (beams[(lane + round_) % 3] for lane in range(3))
        twin = world.fork(best)
        world.close(loser)
        beams = [twin, best, other]
    world.step({sid: [lane] for lane, sid in enumerate(beams)})


@promise("R", "R06")
def each_row_takes_back_its_own_number_of_tokens(subject: Subject) -> None:
    """Three rows get drafts of 4 and keep (4, 1, 0), then (0, 3, 2), then go on: every row equals its own run."""
    world = World(subject, subject.rewindable(4))
    sids = [world.start(tokens(5 + row, row), expect=24) for row in range(3)]
    for draft, kept in enumerate(((4, 1, 0), (0, 3, 2))):
        world.step({sid: tokens(4, row + 3 + draft) for row, sid in enumerate(sids)})
        for sid, keep in zip(sids, kept, strict=True):
            world.truncate(sid, len(world.logs[sid]) - 4 + keep)
    for step in range(3):
        world.step({sid: [step + row] for row, sid in enumerate(sids)})


@promise("R", "R09")
def rewinding_moves_no_memory(subject: Subject) -> None:
    """Under a budget the tensors keep their address, shape and bytes through feed, cut and feed."""
    geometry = subject.rewindable(0)
    facts = stored(subject, geometry)
    world = World(subject, geometry, budget_for(subject, geometry, 1, facts.reach + 8))
    before = [(tensor.data_ptr(), tensor.shape) for tensor in world.cache.tensors()]
    if not before:
        raise NotApplicable("reserves nothing before the first token")
    sid = world.start(tokens(facts.reach + 4), 8, expect=facts.reach + 8)
    world.truncate(sid, len(world.logs[sid]) - int(min(3, facts.rewind)))
    world.feed_on(sid, tokens(4, 1), 2)
    assert before == [(tensor.data_ptr(), tensor.shape) for tensor in world.cache.tensors()], "a rewind replaced a preallocated tensor"


@promise("R", "A10", "L08")
def abort_after_any_layer_is_as_if_never_planned(subject: Subject) -> None:
    """A step fails before the first, between any two and after the last layer; then the same step gives the bits of a clean run."""
    geometry = subject.geometry(windows=(None, 4, None))
    news = tokens(3, 2)
    for layers in range(4):
        clean, hurt = (_forked_world(subject, geometry, shadowed) for shadowed in (False, True))
        before = hurt.cache.stats()
        for _ in range(2):
            plan = hurt.plan({0: news, 1: news[:1]})
            hurt.run(plan, {0: news, 1: news[:1]}, layers)
            hurt.abort(plan)
            hurt.abort(plan)
        assert _in_use(hurt) == (before.in_use_bytes, before.live_bytes), "an aborted step still uses memory"
        for step in ({0: news, 1: news[:1]}, {1: news}, {0: [1], 1: [2]}):
            want, got = clean.step(step), hurt.step(step)
            same = all(np.array_equal(a, b) for sid in want for a, b in zip(want[sid], got[sid], strict=True))
            assert same, f"a step that failed after {layers} layers left a trace"


@promise("R", "A10")
def a_kernel_that_fails_leaves_no_trace(subject: Subject) -> None:
    """Each kernel call of a step fails in turn, also between K and V; after the abort the same step gives the bits of a clean run."""
    geometry = subject.geometry(windows=(None, 4))
    step, after = {0: tokens(3, 2), 1: [7]}, {1: [1], 0: [2]}
    clean = _forked_world(subject, geometry, shadowed=False)
    want = [clean.step(news) for news in (step, after)]
    for call in range(1, 20):
        hurt = _forked_world(subject, geometry, shadowed=False)
        plan = hurt.plan(step)
        hurt.ops.fuse = call - 1
        try:
            hurt.run(plan, step)
        except Planted:
            hurt.abort(plan)
        else:
            hurt.ops.fuse = None
            if call == 1:
                raise NotApplicable("calls no kernel that can be made to fail")
            return
        for outputs, news in zip(want, (step, after), strict=True):
            got = hurt.step(news)
            same = all(np.array_equal(a, b) for sid in got for a, b in zip(outputs[sid], got[sid], strict=True))
            assert same, f"a step whose kernel call {call} failed left a trace"


@promise("R", "R04")
def misuse_is_refused_and_disturbs_nothing(subject: Subject) -> None:
    """A second plan, a stop that feeds nothing, a wrong count of ids, a fork or close in a plan: refused, and the step still ends well."""
    world = World(subject, subject.geometry())
    sid, other = world.start(tokens(6)), world.start(tokens(4, 1))
    plan = world.plan({sid: [1, 2]})
    outputs = world.run(plan, {sid: [1, 2]})
    assert outputs
    for call in (
        lambda: world.cache.plan({other: 9}),
        lambda: world.cache.fork(sid),
        lambda: world.cache.close(sid),
        lambda: world.cache.truncate(sid, 2),
        lambda: world.raw.commit(plan, [0] * (int(plan.cu_seqlens[-1]) + 1)),
    ):
        _refused(call, (RuntimeError, ValueError))
    world.commit(plan, {sid: [1, 2]})
    _refused(lambda: world.raw.commit(plan, [1, 2]), (RuntimeError,))
    world.abort(plan)
    for stops in ({}, {sid: 8}, {sid: 3}):
        _refused(lambda stops=stops: world.cache.plan(stops), (ValueError,))
    world.step({other: [4], sid: [5]})


def _refused(call: object, kinds: tuple[type[Exception], ...]) -> None:
    try:
        call()
    except CannotRewind as error:
        raise AssertionError(f"the wrong refusal: {error}") from error
    except kinds:
        return
    raise AssertionError("something that makes no sense was accepted")


def _forked_world(subject: Subject, geometry: Geometry, shadowed: bool) -> World:
    """Sequence 0 and its child 1, which share a partial page."""
    world = World(subject, geometry, shadowed=shadowed)
    world.start(tokens(9), 4, expect=20)
    world.fork(0)
    return world


def _in_use(world: World) -> tuple[int, int]:
    stats = world.cache.stats()
    return stats.in_use_bytes, stats.live_bytes
