"""The scheduler decides with integers alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.engine.scheduler import Entry, Scheduler
from strategies.geometry import CacheFull


class Held:
    """A cache made of lengths: `opened` hands out sids, `held` answers what was fed so far."""

    def __init__(self, keeps: bool = True) -> None:
        self.lengths: dict[int, int] = {}
        self.keeps = keeps
        self.full = False

    def opened(self, entry: Entry) -> int:
        if self.full:
            raise CacheFull(1, ())
        sid = 100 + entry.id
        self.lengths[sid] = 0
        return sid

    def held(self, sid: int) -> int:
        return self.lengths[sid]

    def feed(self, stops: dict[int, int]) -> None:
        if self.keeps:
            self.lengths.update(stops)


def scheduler(
    step_tokens: int = 8, max_sequences: int | None = None, budget: int | None = None, row_bytes: int = 1, context: int = 64
) -> Scheduler:
    return Scheduler(step_tokens, max_sequences, budget, lambda lengths: row_bytes * sum(lengths), context)


def entry(id_: int, known: int, new: int = 4, age: int | None = None) -> Entry:
    return Entry(id_, id_ if age is None else age, known, known + new - 1)


def test_a_long_prompt_is_cut_to_the_tokens_of_a_step():
    held, plan = Held(), scheduler(step_tokens=8)
    plan.submit(entry(0, known=20))
    fed = []
    for _ in range(3):
        stops = plan.schedule(held.held, held.opened)
        fed.append(stops)
        held.feed(stops)
    assert fed == [{100: 8}, {100: 16}, {100: 20}]


def test_the_tokens_of_a_step_are_shared_oldest_first():
    held, plan = Held(), scheduler(step_tokens=8)
    for id_ in (1, 0, 2):
        plan.submit(entry(id_, known=5))
    assert plan.schedule(held.held, held.opened) == {100: 5, 101: 3}


def test_one_token_sequences_are_served_before_older_prompts():
    held, plan = Held(), scheduler(step_tokens=4)
    plan.submit(entry(0, known=40))
    plan.submit(entry(1, known=1))
    held.feed(plan.schedule(held.held, held.opened))
    plan.enter(entry(2, known=3), 102)
    held.lengths[102] = 2
    assert list(plan.schedule(held.held, held.opened).items()) == [(102, 3), (100, 7)]


def test_nothing_is_split_when_the_cache_keeps_nothing():
    held, plan = Held(keeps=False), scheduler(step_tokens=8, row_bytes=0)
    plan.submit(entry(0, known=20))
    plan.submit(entry(1, known=3))
    plan.submit(entry(2, known=3))
    assert plan.schedule(held.held, held.opened) == {100: 20}
    plan.leave(plan.running[0])
    assert plan.schedule(held.held, held.opened) == {101: 3, 102: 3}


def test_a_request_that_can_never_fit_is_refused_with_both_numbers():
    assert scheduler(budget=10).refusal(10) is None
    assert scheduler(budget=10).refusal(11) == "it needs 11 bytes of KV for 11 tokens and the budget is 10 bytes"
    assert scheduler(context=64).refusal(65) == "it needs 65 positions and the context has 64"
    assert scheduler(budget=None).refusal(64) is None


def test_admission_stops_where_the_bytes_end():
    held, plan = Held(), scheduler(step_tokens=64, budget=12)
    for id_ in range(3):
        plan.submit(entry(id_, known=5))
    assert set(plan.schedule(held.held, held.opened)) == {100, 101}
    assert [e.id for e in plan.waiting] == [2]


def test_a_preempted_sequence_keeps_its_age_and_waits_until_somebody_leaves():
    held, plan = Held(), scheduler(step_tokens=64)
    for id_ in range(4):
        plan.submit(entry(id_, known=5))
    held.feed(plan.schedule(held.held, held.opened))
    plan.submit(entry(9, known=1))
    assert plan.youngest().id == 3
    plan.evict(plan.youngest())
    assert [e.id for e in plan.waiting] == [3, 9]
    plan.running[0].known = 6
    assert plan.schedule(held.held, held.opened) == {100: 6}
    plan.leave(plan.running[0])
    assert set(plan.schedule(held.held, held.opened)) == {103, 109}


def test_a_cache_that_cannot_open_leaves_the_queue_as_it_was():
    held, plan = Held(), scheduler()
    held.full = True
    plan.submit(entry(0, known=5))
    assert plan.schedule(held.held, held.opened) == {}
    assert [e.id for e in plan.waiting] == [0]
    held.full = False
    assert plan.schedule(held.held, held.opened) == {100: 5}


def test_guesses_take_part_in_the_count():
    held, plan = Held(), scheduler(step_tokens=3)
    plan.submit(entry(0, known=1))
    held.feed(plan.schedule(held.held, held.opened))
    plan.running[0].known, plan.running[0].drafted = 2, 4
    assert plan.schedule(held.held, held.opened) == {100: 4}


@pytest.mark.parametrize(("step_tokens", "max_sequences", "named"), [(0, None, "step_tokens=0"), (4, 0, "max_sequences=0")])
def test_limits_that_stop_everything_are_refused(step_tokens, max_sequences, named):
    with pytest.raises(ValueError, match=named):
        scheduler(step_tokens, max_sequences)


def test_the_scheduler_needs_no_torch():
    code = "import sys, harness.engine.scheduler, harness.engine.request; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
