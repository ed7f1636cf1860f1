"""The gate on several runs, whose spread differs from benchmark to benchmark: simulated sessions of whole suites."""

from __future__ import annotations

import math
import random

import pytest

from harness.measure.gate import INCONCLUSIVE, PASS, REGRESSION, Speed, changes, judge_speed, of_runs, settle

SESSIONS = 1000
SLOWER = math.log(1.3)
TYPICAL = {f"b{number}": 0.01 + 0.005 * number for number in range(8)}  # standard deviation between runs: 1 to 4.5 %


def one_run(rng: random.Random, spreads: dict[str, float], slower: dict[str, float], drift: float = 0.0) -> dict[str, Speed]:
    """What a run says of each benchmark; its own noise is much smaller than what differs between runs."""
    return {name: Speed(1.0 + drift + slower.get(name, 0.0) + rng.gauss(0.0, spread), 0.005, 11) for name, spread in spreads.items()}


def turns(rng: random.Random, count: int, spreads: dict[str, float], slower: dict[str, float]) -> list[dict[str, Speed]]:
    """Changes of two commits measured in turns, on a machine that drifts from turn to turn."""
    found = []
    for _ in range(count):
        drift = rng.gauss(0.0, 0.2)
        found.append(changes(one_run(rng, spreads, {}, drift), one_run(rng, spreads, slower, drift)))
    return found


def judged(changed: dict[str, Speed]) -> dict[str, str]:
    return {name: judge_speed(name, change).verdict for name, change in changed.items()}


def test_the_same_code_in_turns_hardly_ever_fails_in_any_benchmark():
    rng = random.Random(1)
    sessions = [judged(of_runs(turns(rng, 10, TYPICAL, {}))) for _ in range(SESSIONS)]
    assert sum(REGRESSION in session.values() for session in sessions) <= SESSIONS // 1000
    assert sum(set(session.values()) == {PASS} for session in sessions) >= 0.95 * SESSIONS


def test_1_3_in_two_of_eight_fails_in_turns_and_nothing_else_does():
    rng = random.Random(2)
    slower = {"b2": SLOWER, "b6": SLOWER}
    sessions = [judged(of_runs(turns(rng, 10, TYPICAL, slower))) for _ in range(SESSIONS)]
    failed = [{name for name, verdict in session.items() if verdict == REGRESSION} for session in sessions]
    assert all(names <= set(slower) for names in failed)
    assert sum("b2" in names for names in failed) >= 0.99 * SESSIONS
    assert sum("b6" in names for names in failed) >= 0.95 * SESSIONS
    assert sum(session[name] == PASS for session in sessions for name in slower) <= SESSIONS // 1000


@pytest.mark.parametrize("noise", [0.03, 0.05, 0.1])
@pytest.mark.parametrize("count", [4, 6])
def test_a_quiet_pool_does_not_vouch_for_one_noisy_benchmark(count, noise):
    rng = random.Random(f"noisy {count} {noise}")
    spreads = dict.fromkeys(TYPICAL, 0.015) | {"b0": noise}
    same = [judged(of_runs(turns(rng, count, spreads, {})))["b0"] for _ in range(SESSIONS)]
    slow = [judged(of_runs(turns(rng, count, spreads, {"b0": SLOWER})))["b0"] for _ in range(SESSIONS)]
    assert same.count(REGRESSION) <= SESSIONS // 1000
    assert slow.count(PASS) <= SESSIONS // 1000


def test_adding_turns_until_there_is_a_verdict_does_not_make_verdicts_wrong():
    """What the planted fault, `make baseline` and CI do: look after every turn, from the fourth on, and stop at the first verdict."""
    rng = random.Random(3)
    spreads = {name: 2 * spread for name, spread in TYPICAL.items()}

    def first_verdict(slower: dict[str, float]) -> dict[str, str]:
        found = turns(rng, 3, spreads, slower)
        verdicts = {"": INCONCLUSIVE}
        while INCONCLUSIVE in verdicts.values() and len(found) < 24:
            found += turns(rng, 1, spreads, slower)
            verdicts = judged(of_runs(found))
        return verdicts

    same = [first_verdict({}) for _ in range(SESSIONS)]
    assert sum(REGRESSION in session.values() for session in same) <= SESSIONS // 1000
    assert sum(set(session.values()) == {PASS} for session in same) >= 0.95 * SESSIONS
    slow = [first_verdict({"b3": SLOWER})["b3"] for _ in range(SESSIONS)]
    assert slow.count(PASS) <= SESSIONS // 1000
    assert slow.count(REGRESSION) >= 0.99 * SESSIONS


MANY = {f"b{number}": 0.01 + 0.0005 * number for number in range(70)}


def other_session(rng: random.Random, moved: float, slower: dict[str, float]) -> dict[str, str]:
    """Four runs of a baseline, one of now, on a machine that slows each benchmark by something of its own, `moved` on average."""
    state = {name: rng.gauss(0.0, moved) + slower.get(name, 0.0) for name in MANY}
    before = of_runs([one_run(rng, MANY, {}) for _ in range(4)])
    return judged(settle(changes(before, one_run(rng, MANY, state, drift=rng.gauss(0.0, moved)))))


@pytest.mark.parametrize("moved", [0.0, 0.03, 0.1, 0.3])
def test_a_machine_in_another_state_makes_no_regression(moved):
    rng = random.Random(f"state {moved}")
    sessions = [other_session(rng, moved, {}) for _ in range(SESSIONS // 5)]  # of 70 comparisons each
    assert sum(REGRESSION in session.values() for session in sessions) == 0


def test_a_slow_kernel_is_found_in_another_session_of_a_quiet_machine():
    rng = random.Random(4)
    slower = {f"b{number}": SLOWER for number in range(10)}
    sessions = [other_session(rng, 0.0, slower) for _ in range(SESSIONS // 5)]
    found = sum(session[name] == REGRESSION for session in sessions for name in slower)
    assert found >= 0.95 * len(sessions) * len(slower)
    assert sum(session[name] == PASS for session in sessions for name in slower) == 0


def test_what_slows_everything_alike_is_inconclusive_between_sessions():
    rng = random.Random(5)
    sessions = [other_session(rng, 0.0, dict.fromkeys(MANY, SLOWER)) for _ in range(SESSIONS // 5)]
    assert all(set(session.values()) == {INCONCLUSIVE} for session in sessions)
