"""The same workload on a strategy and on its reference, again and again, side by side in one process.

It does not know what a strategy is: it is handed two things to run, and compares the event logs that they return.

Machine noise drifts, so the two are run in pairs, in random order within each pair, and compared pair by pair. First use
(compiling, allocating, paging in) is paid before the first pair and reported apart. When both are the same thing, the
result is the noise floor: a twin, the reference once more, is run within each pair to find it.

A pair during which other processes took a core's share is taken again: it says more about them. The reason is read from the
system's counters, never from the times, so nothing is chosen by its result; how many pairs went this way is part of the result.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from harness.engine.events import EventLog
from harness.errors import UserError
from harness.measure.clock import Clock, Conditions, quiet
from harness.measure.compare import BETTER, LOWER, MIN_PAIRS, Comparison, compare, noise_floor
from harness.measure.interference import disturbed, others_s
from harness.measure.metrics import SUMMARY_KEYS, TIMINGS, metrics, quantile

MEDIANS = {"itl_s": "itl_p50_s"}  # steadier than the mean on a busy machine, blind to rare slow steps
DIRECTIONS = {**BETTER, **dict.fromkeys(MEDIANS.values(), LOWER)}
Run = Callable[[], EventLog]
Taken = TypeVar("Taken")


@dataclass(frozen=True)
class Samples:
    """All runs of one side, in the order of the pairs. `first_use_s` is what the very first run took beyond a usual one."""

    logs: tuple[EventLog, ...]
    timings: tuple[dict[str, float | None], ...]  # of each run
    first_run_s: float
    first_use_s: float

    def of(self, name: str) -> list[float | None]:
        """One value of this timing per run; None where a run has none."""
        return [run[name] for run in self.timings]

    @property
    def typical(self) -> EventLog:
        """The run of median duration (the faster of the middle two): one run whose numbers belong together."""
        order = sorted(range(len(self.logs)), key=lambda run: self.timings[run]["wall_s"])
        return self.logs[order[(len(order) - 1) // 2]]


@dataclass(frozen=True)
class Paired:
    """The raw result: logs[i] of all sides were taken side by side; order[i] says which ran first. `twin` is the reference again."""

    strategy: Samples
    reference: Samples
    twin: Samples | None
    order: tuple[str, ...]
    elapsed_s: float
    conditions: Conditions
    disturbed: int  # pairs that others disturbed and that count all the same, because too many were
    set_aside: int  # disturbed pairs that were taken again

    @property
    def pairs(self) -> int:
        return len(self.order)

    def compared(self) -> dict[str, Comparison]:
        """The verdict on each timing that both sides have in every run, held against the twin's noise floor where there is a twin."""
        floors = self.floors()
        both = _comparable(self.strategy, self.reference)
        return {name: compare(*samples, DIRECTIONS[name], floors.get(name)) for name, samples in both.items()}

    def floors(self) -> dict[str, float]:
        """Noise floor by timing: how far apart the reference and its twin may lie. Empty without a twin."""
        if self.twin is None:
            return {}
        return {name: noise_floor(*samples) for name, samples in _comparable(self.twin, self.reference).items()}

    def raw(self) -> dict[str, dict[str, list[float | None]]]:
        """Every sample, by side and timing, in the order of the pairs."""
        sides = {"strategy": self.strategy, "reference": self.reference, "twin": self.twin}
        return {side: {name: samples.of(name) for name in DIRECTIONS} for side, samples in sides.items() if samples is not None}


def _comparable(first: Samples, second: Samples) -> dict[str, tuple[list[float], list[float]]]:
    """The samples of both, by timing, where every run of both has a positive one."""
    both = {name: (first.of(name), second.of(name)) for name in DIRECTIONS}
    return {name: sides for name, sides in both.items() if all(value is not None and value > 0 for side in sides for value in side)}


def timings(log: EventLog) -> dict[str, float | None]:
    """One number per timing for one run: distributions by their mean, and the median where it is steadier."""
    found = metrics(log, 0, None, None)
    numbers = {name: found[name]["mean"] if isinstance(found[name], dict) else found[name] for name in TIMINGS}
    return numbers | {median: found[name][SUMMARY_KEYS[1]] for name, median in MEDIANS.items()}


def measure_pairs(
    strategy: Run,
    reference: Run,
    clock: Clock,
    seed: int,
    pairs: int = MIN_PAIRS,
    seconds: float = 30.0,
    warmup: int = 1,
    threads: int | None = None,
    progress: Callable[[int, int], None] = lambda done, least: None,
    twin: Run | None = None,
    others: Callable[[], float | None] = others_s,
) -> Paired:
    """Take at least `pairs` pairs, then more while another one fits into `seconds`.

    strategy, reference: run the workload once, on a fresh cache, with the same prompts. warmup: uncounted runs of each side
    first. seed decides the order within pairs. threads: of torch, None = as they are. progress(pairs done, pairs or more).
    twin: the reference once more, run within each pair, for the noise floor; it needs no warm-up of its own (None: no floor).
    others: CPU seconds that other processes have used so far; up to `pairs` disturbed pairs are taken again.
    UserError for limits that leave nothing to compare.
    """
    if pairs < MIN_PAIRS:
        raise UserError(f"measure.pairs={pairs}: an interval needs {MIN_PAIRS} pairs or more")
    if warmup < 1:
        raise UserError(f"measure.warmup={warmup}: use 1 or more, so that first use stays out of the samples")
    runs = {"strategy": strategy, "reference": reference}
    rng = random.Random(seed)
    with quiet(threads) as conditions, _old_objects_left_alone():
        first_s = {name: _warm(run, warmup) for name, run in runs.items()}
        if twin is not None:
            runs["twin"], first_s["twin"] = twin, first_s["reference"]
        start_s = clock.now()
        logs: dict[str, list[EventLog]] = {name: [] for name in runs}
        order: list[str] = []
        longest_s, disturbed_pairs, set_aside = 0.0, 0, 0
        while len(order) < pairs or clock.now() - start_s + longest_s <= seconds:
            taken, took_s, busy = one_round(runs, rng, clock, others)
            if busy:
                if set_aside < pairs:
                    set_aside += 1
                    continue
                disturbed_pairs += 1
            for name, log in taken.items():
                logs[name].append(log)
            order.append(next(iter(taken)))
            longest_s = max(longest_s, took_s)
            progress(len(order), pairs)
        elapsed_s = clock.now() - start_s
    sides = {name: _samples(logs[name], first_s[name]) for name in runs}
    return Paired(sides["strategy"], sides["reference"], sides.get("twin"), tuple(order), elapsed_s, conditions, disturbed_pairs, set_aside)


def one_round(
    runs: Mapping[str, Callable[[], Taken]], rng: random.Random, clock: Clock, others: Callable[[], float | None] = others_s
) -> tuple[dict[str, Taken], float, bool]:
    """Each run once, side by side -> (what they returned, in the random order they ran in; seconds; whether others disturbed it)."""
    start_s, others_before_s = clock.now(), others()
    taken = {name: _once(runs[name]) for name in rng.sample(list(runs), len(runs))}
    took_s = clock.now() - start_s
    return taken, took_s, disturbed(others_before_s, others(), took_s)


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Collections inside this look at new objects only: they take milliseconds instead of most of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _once(run: Callable[[], Taken]) -> Taken:
    """One run that begins with no garbage: a cache of an earlier run may be part of a cycle, and collection is off while timing."""
    gc.collect()
    return run()


def _warm(run: Run, runs: int) -> float:
    """Run `runs` times -> seconds that the steps of the first run took."""
    first, *_ = [_once(run) for _ in range(runs)]
    return timings(first)["wall_s"]


def _samples(logs: list[EventLog], first_run_s: float) -> Samples:
    found = tuple(timings(log) for log in logs)
    usual_s = quantile([run["wall_s"] for run in found], 0.5)
    return Samples(tuple(logs), found, first_run_s, max(0.0, first_run_s - usual_s))
