"""Random life: any order of any calls, by hypothesis, shrunk to the shortest life that breaks a promise.

Needs the `hypothesis` package (the extra `conformance`). Every step is checked by the world: answers against the oracle,
positions, bytes; at the end of each life all capacity must come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import numpy as np

from harness.conformance.promise import promise
from harness.conformance.subject import Subject
from harness.conformance.toy import HEAD_DIMS, HEADS
from harness.conformance.world import World, budget_for, tokens
from harness.errors import UserError
from strategies.geometry import CacheFull, CannotRewind, Geometry

STEPS = 24  # calls in one life
SHRINKING_S = 30
WINDOWS = ((None, 4), (None, None))
SHAPES = tuple(zip((*HEADS, *HEADS[:1]), HEAD_DIMS, strict=True))  # ((query heads, KV heads), head_dim)
UNIT = 9  # tokens of the sequence that capacity is counted in


@promise("A", "A04", "A02", "A10", "L04", "R01", "D08")
def any_life_within_a_budget_keeps_every_promise(subject: Subject) -> None:
    """Open, feed in any batch and chunks, abort after any layer, fork, cut, close, be refused: under a budget of a few sequences."""
    _live(subject, budgeted=True)


@promise("R", "R01", "R07", "L04", "B08")
def any_life_without_a_budget_keeps_every_promise(subject: Subject) -> None:
    """The same with memory that grows as needed: moves and rebuilds instead of refusals."""
    _live(subject, budgeted=False)


def _live(subject: Subject, budgeted: bool) -> None:
    try:
        import hypothesis
        from hypothesis import HealthCheck, Phase, settings, stateful
    except ImportError as error:
        raise UserError("the random lives of the kit need the hypothesis package: pip install 'kvbench[conformance]'") from error
    machine = _machine(subject, budgeted)
    quiet = settings(
        max_examples=subject.examples,
        stateful_step_count=STEPS,
        phases=(Phase.generate, Phase.shrink),
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    hypothesis.seed(subject.seed)(machine)
    with _short_shrinking(), redirect_stdout(StringIO()):
        stateful.run_state_machine_as_test(machine, settings=quiet)


@contextmanager
def _short_shrinking() -> Iterator[None]:
    """Hypothesis shrinks a failure for up to five minutes: long before that, the life is short enough to read."""
    from hypothesis.internal.conjecture import engine

    usual = getattr(engine, "MAX_SHRINKING_SECONDS", None)
    if usual is None:
        yield
        return
    engine.MAX_SHRINKING_SECONDS = SHRINKING_S
    try:
        yield
    finally:
        engine.MAX_SHRINKING_SECONDS = usual


def _machine(subject: Subject, budgeted: bool) -> type:
    """A hypothesis state machine around one world. Numbers drawn are reduced modulo what is alive, so that shrinking stays legal."""
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

    small = st.integers(0, 11)
    purse = _Purse(subject)

    class Life(RuleBasedStateMachine):
        world: World | None = None

        @initialize(shape=st.sampled_from(SHAPES), windows=st.sampled_from(WINDOWS), count=st.integers(1, 3), seed=st.integers(0, 3))
        def born(self, shape: tuple[tuple[int, int], int], windows: tuple[int | None, ...], count: int, seed: int) -> None:
            geometry = subject.geometry(shape[0], shape[1], windows, context=64)
            budget, self.fresh = purse.of(geometry, count) if budgeted else (None, None)
            self.world = World(subject, geometry, budget)
            self.draws = np.random.default_rng(seed)
            self.open(None, 7)

        @precondition(lambda self: len(self.world.logs) < 6)
        @rule(expect=st.sampled_from((None, 3, 9, 30)), prompt=small)
        def open(self, expect: int | None, prompt: int) -> None:
            sid = self.world.open(tokens(prompt, prompt % 3), expect)
            if prompt > len(self.world.logs[sid]):
                self._step({sid: tokens(prompt, prompt % 3)[len(self.world.logs[sid]) :]}, None)

        @precondition(lambda self: self.world.logs)
        @rule()
        def decode(self) -> None:
            self._step({sid: self._draw(1) for sid, log in self.world.logs.items() if len(log) < self.world.geometry.context}, None)

        @precondition(lambda self: self.world.logs)
        @rule(picks=st.lists(st.tuples(small, st.integers(1, 9)), min_size=1, max_size=4), layers=st.integers(0, 2), kept=st.booleans())
        def feed(self, picks: list[tuple[int, int]], layers: int, kept: bool) -> None:
            news = {}
            for pick, count in picks:
                sid = self._sid(pick)
                room = self.world.geometry.context - len(self.world.logs[sid])
                if room:
                    news[sid] = self._draw(min(count, room))
            self._step(news, None if kept else layers)

        def _draw(self, count: int) -> list[int]:
            return self.draws.integers(0, 90, count).tolist()

        def _step(self, news: dict[int, list[int]], aborted_after: int | None) -> None:
            if not news:
                return
            before = self.world.cache.stats()
            try:
                plan = self.world.plan(news)
            except CacheFull as full:
                assert budgeted, f"refused without a budget: {full}"
                assert full.short_bytes > 0 and set(full.sids) <= set(news), f"CacheFull({full.short_bytes}, {full.sids}) for {list(news)}"
                assert self.world.cache.stats() == before, "a refused plan changed the cache"
                return
            self.world.run(plan, news, aborted_after)
            if aborted_after is None:
                self.world.commit(plan, news)
            else:
                self.world.abort(plan)

        @precondition(lambda self: self.world.logs and len(self.world.logs) < 6)
        @rule(pick=small)
        def fork(self, pick: int) -> None:
            self.world.fork(self._sid(pick))

        @precondition(lambda self: self.world.logs)
        @rule(pick=small, back=small)
        def truncate(self, pick: int, back: int) -> None:
            sid = self._sid(pick)
            length = len(self.world.logs[sid])
            try:
                self.world.truncate(sid, max(0, length - back))
            except CannotRewind:
                self.world.check()

        @precondition(lambda self: self.world.logs)
        @rule(pick=small)
        def close(self, pick: int) -> None:
            self.world.close(self._sid(pick))

        def teardown(self) -> None:
            if self.world is None or not self.world.whole:
                return  # a step or a check has failed: that is the error to tell, not what follows from it
            self.world.close_all()
            assert self.world.cache.stats().in_use_bytes == 0, "memory is in use with no sequence open"
            if self.fresh is not None:
                assert self.world.capacity(UNIT, 60) == self.fresh, "the capacity of a fresh cache did not come back"

        def _sid(self, pick: int) -> int:
            return sorted(self.world.logs)[pick % len(self.world.logs)]

    return Life


class _Purse:
    """Budgets by geometry and number of sequences, each worked out once."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._known: dict[tuple[Geometry, int], tuple[int | None, int | None]] = {}

    def of(self, geometry: Geometry, count: int) -> tuple[int | None, int | None]:
        """A budget for `count` sequences of UNIT tokens, and how many a fresh cache then holds; None, None when nothing is stored."""
        key = (geometry, count)
        if key not in self._known:
            budget = budget_for(self._subject, geometry, count, UNIT)
            fresh = None if budget is None else World(self._subject, geometry, budget, shadowed=False).capacity(UNIT, 60)
            self._known[key] = (budget, fresh)
        return self._known[key]
