"""Pairs: random order, the same number on each side, first use apart, verdicts that follow planted effects. The clock is ours."""

from __future__ import annotations

import gc
import math
import random
import weakref

import pytest

from harness.engine.events import DECODE, LENGTH, PREFILL, EventLog, StepEvent, TokenEvent
from harness.errors import UserError
from harness.measure import paired
from harness.measure.clock import ManualClock
from harness.measure.points import beats_from, itl_law, itl_points


def measure_pairs(*given, others=lambda: None, **named) -> paired.Paired:
    """On a machine whose neighbours are ours too: by default they are not known."""
    return paired.measure_pairs(*given, others=others, **named)


def a_log(clock: ManualClock, prefill_s: float, decode_s, new_tokens: int = 6, prompt: int = 10) -> EventLog:
    """One request: a prefill step, then one decode step per token that takes decode_s(context)."""
    log = EventLog()
    log.arrived(0, clock.now(), prompt)
    for step in range(new_tokens):
        start_s, context = clock.now(), prompt + step
        clock.advance(prefill_s if step == 0 else decode_s(context))
        fed = (prompt, 0) if step == 0 else (0, 1)
        phase = PREFILL if step == 0 else DECODE
        log.stepped(StepEvent(step, start_s, clock.now(), 1, *fed, 0, 1, 8, 8, 8, 0), [TokenEvent(0, step, phase, step, context, 5)])
    log.ended(0, LENGTH, clock.now())
    return log


class Bench:
    """Runs with a planted speed, noise and first-use cost, on a clock of their own."""

    def __init__(self, noise: float = 0.0) -> None:
        self.clock = ManualClock()
        self.rng = random.Random(3)
        self.noise = noise
        self.ran: list[str] = []

    def run(self, name: str, factor: float, first_use_s: float = 0.0):
        def once() -> EventLog:
            extra_s = first_use_s if name not in self.ran else 0.0
            self.ran.append(name)
            assert not gc.isenabled()
            speed = factor * math.exp(self.rng.gauss(0.0, self.noise))
            return a_log(self.clock, extra_s + 0.2 * speed, lambda context: 0.01 * speed)

        return once


def test_a_planted_effect_is_found_and_named():
    bench = Bench(noise=0.01)
    result = measure_pairs(bench.run("ours", 0.8), bench.run("theirs", 1.0), bench.clock, seed=0, pairs=8, seconds=0.0)
    verdicts = result.compared()
    assert verdicts["itl_s"].verdict == "faster"
    assert verdicts["itl_s"].interval.ratio == pytest.approx(0.8, rel=0.03)
    assert verdicts["decode_tok_per_s"].verdict == "faster"
    assert verdicts["decode_tok_per_s"].interval.ratio == pytest.approx(1.25, rel=0.03)
    assert verdicts["itl_p50_s"].interval.pairs == 8
    assert set(verdicts) >= {"ttft_s", "itl_s", "e2e_s", "wall_s", "prefill_tok_per_s", "decode_tok_per_s", "output_tok_per_s"}


def test_the_reference_and_its_twin_give_the_noise_floor_of_the_same_minutes():
    bench = Bench(noise=0.02)
    sides = bench.run("a", 1.0), bench.run("b", 1.0)
    result = measure_pairs(*sides, bench.clock, seed=0, pairs=10, seconds=0.0, twin=bench.run("b", 1.0))
    assert 0.001 < result.floors()["itl_s"] < 0.05
    assert {comparison.noise_floor for comparison in result.compared().values()} == set(result.floors().values())
    assert {comparison.verdict for comparison in result.compared().values()} == {"indistinguishable"}
    assert len(result.raw()["twin"]["itl_s"]) == result.pairs == 10


def test_a_twin_is_run_once_in_each_pair_at_a_random_place():
    bench = Bench()
    sides = bench.run("strategy", 1.0), bench.run("reference", 1.0)
    measure_pairs(*sides, bench.clock, seed=0, pairs=20, seconds=0.0, twin=bench.run("twin", 1.0))
    rounds = [bench.ran[2 + 3 * number : 5 + 3 * number] for number in range(20)]
    assert all(sorted(ran) == ["reference", "strategy", "twin"] for ran in rounds)
    assert {ran.index("twin") for ran in rounds} == {0, 1, 2}


def test_an_effect_below_the_noise_floor_is_no_effect():
    def verdict(twin_factor):
        bench = Bench()
        sides = bench.run("a", 0.99), bench.run("b", 1.0)
        twin = None if twin_factor is None else bench.run("b", twin_factor)
        return measure_pairs(*sides, bench.clock, seed=0, seconds=0.0, twin=twin).compared()["itl_s"].verdict

    assert verdict(None) == verdict(1.0) == "faster"
    assert verdict(1.05) == "indistinguishable"


class Neighbours:
    """Other processes that take a whole core during the pairs of these numbers, and 5 % of one otherwise."""

    def __init__(self, clock: ManualClock, busy: set[int]) -> None:
        self.clock, self.busy = clock, busy
        self.readings, self.total_s, self.last_s = 0, 0.0, clock.now()

    def __call__(self) -> float:
        pair, ends = divmod(self.readings, 2)
        if ends:
            self.total_s += (1.0 if pair in self.busy else 0.05) * (self.clock.now() - self.last_s)
        self.readings, self.last_s = self.readings + 1, self.clock.now()
        return self.total_s


@pytest.mark.parametrize(("busy", "set_aside", "disturbed", "runs"), [(set(), 0, 0, 5), ({0, 3}, 2, 0, 7), (set(range(99)), 5, 5, 10)])
def test_pairs_that_others_disturb_are_taken_again_while_there_is_hope(busy, set_aside, disturbed, runs):
    bench = Bench()
    sides = bench.run("a", 1.0), bench.run("b", 1.0)
    result = measure_pairs(*sides, bench.clock, seed=0, pairs=5, seconds=0.0, others=Neighbours(bench.clock, busy))
    assert (result.pairs, result.set_aside, result.disturbed) == (5, set_aside, disturbed)
    assert len(bench.ran) == 2 + 2 * runs
    assert len(result.strategy.logs) == len(result.reference.logs) == 5


def test_a_system_that_does_not_tell_disturbs_nothing():
    bench = Bench()
    result = measure_pairs(bench.run("a", 1.0), bench.run("b", 1.0), bench.clock, seed=0, seconds=0.0, others=lambda: None)
    assert (result.set_aside, result.disturbed) == (0, 0)


def test_first_use_is_reported_apart_and_in_no_sample():
    bench = Bench()
    result = measure_pairs(bench.run("ours", 1.0, first_use_s=3.0), bench.run("theirs", 1.0), bench.clock, seed=0, seconds=0.0)
    assert result.strategy.first_use_s == pytest.approx(3.0)
    assert result.reference.first_use_s == pytest.approx(0.0)
    assert max(result.strategy.of("ttft_s")) == pytest.approx(0.2)


def test_each_pair_holds_one_run_of_each_side_and_the_order_is_random_but_seeded():
    def orders(seed):
        bench = Bench()
        result = measure_pairs(bench.run("strategy", 1.0), bench.run("reference", 1.0), bench.clock, seed, pairs=20, seconds=0.0, warmup=2)
        assert bench.ran[:4] == ["strategy"] * 2 + ["reference"] * 2
        pairs = list(zip(bench.ran[4::2], bench.ran[5::2], strict=True))
        assert all(set(pair) == {"strategy", "reference"} for pair in pairs)
        assert tuple(first for first, _ in pairs) == result.order
        return result.order

    assert set(orders(0)) == {"strategy", "reference"}
    assert orders(0) == orders(0)
    assert orders(0) != orders(1)


def test_more_pairs_are_taken_while_they_fit_the_time():
    bench = Bench()
    result = measure_pairs(bench.run("a", 1.0), bench.run("b", 1.0), bench.clock, seed=0, pairs=5, seconds=10.0)
    pair_s = 2 * (0.2 + 5 * 0.01)
    assert result.pairs == 20 == math.floor(10.0 / pair_s + 1e-9)
    assert result.elapsed_s <= 10.0 + 1e-9


def test_five_pairs_are_taken_however_long_they_last():
    bench = Bench()
    assert measure_pairs(bench.run("a", 100.0), bench.run("b", 1.0), bench.clock, seed=0, seconds=1.0).pairs == 5


def test_progress_counts_pairs():
    bench, said = Bench(), []
    measure_pairs(
        bench.run("a", 1.0), bench.run("b", 1.0), bench.clock, 0, seconds=0.0, progress=lambda done, least: said.append((done, least))
    )
    assert said == [(n, 5) for n in range(1, 6)]


def test_raw_samples_are_kept_in_the_order_of_the_pairs():
    bench = Bench(noise=0.1)
    result = measure_pairs(bench.run("a", 1.0), bench.run("b", 1.0), bench.clock, seed=0, seconds=0.0)
    raw = result.raw()
    assert [len(raw[side]["itl_s"]) for side in ("strategy", "reference")] == [5, 5]
    assert len(set(raw["strategy"]["itl_s"])) == 5
    assert sorted(raw["strategy"]["wall_s"])[2] == pytest.approx(
        result.strategy.typical.steps[-1].end_s - result.strategy.typical.steps[0].start_s
    )


def test_a_timing_that_a_run_does_not_have_is_left_out():
    clock = ManualClock()

    def one_token() -> EventLog:
        return a_log(clock, 0.1, lambda context: 0.0, new_tokens=1)

    result = measure_pairs(one_token, one_token, clock, seed=0, seconds=0.0)
    assert set(result.compared()) == {"ttft_s", "e2e_s", "wall_s", "prefill_tok_per_s", "output_tok_per_s"}


def test_the_collector_runs_between_runs_and_is_back_afterwards():
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    bench, alive = Bench(), []

    def run():
        assert not any(ref() is not None for ref in alive)
        alive.append(weakref.ref(Cycle()))
        return bench.run("a", 1.0)()

    measure_pairs(run, run, bench.clock, seed=0, seconds=0.0)
    assert gc.isenabled()


@pytest.mark.parametrize(("limits", "named"), [({"pairs": 4}, "measure.pairs=4"), ({"warmup": 0}, "measure.warmup=0")])
def test_limits_that_leave_nothing_to_compare_are_refused(limits, named):
    bench = Bench()
    with pytest.raises(UserError, match=named):
        measure_pairs(bench.run("a", 1.0), bench.run("b", 1.0), bench.clock, seed=0, **limits)


def test_the_line_of_itl_against_context_is_recovered_from_logs():
    clock = ManualClock()
    logs = [a_log(clock, 0.1, lambda context: 0.02 + 0.001 * context, new_tokens=20) for _ in range(3)]
    logs.append(a_log(clock, 0.1, lambda context: 5.0 if context == 15 else 0.02 + 0.001 * context, new_tokens=20))
    law = itl_law(logs)
    assert law.intercept_s == pytest.approx(0.02)
    assert law.slope_s == pytest.approx(0.001)
    assert [context for context, _ in itl_points(logs)] == list(range(11, 30))


def test_the_break_even_context_is_where_the_lines_cross():
    clock = ManualClock()
    flat = [a_log(clock, 0.1, lambda context: 0.05 + 0.0001 * context, new_tokens=30)]
    steep = [a_log(clock, 0.1, lambda context: 0.02 + 0.0004 * context, new_tokens=30)]
    found = beats_from(flat, steep, limit=1000)
    assert found.outcome == "from"
    assert found.context == pytest.approx(100)


def test_two_contexts_make_no_line():
    clock = ManualClock()
    short = [a_log(clock, 0.1, lambda context: 0.01, new_tokens=3)]
    assert itl_law(short) is None
    assert beats_from(short, short, limit=100) is None
