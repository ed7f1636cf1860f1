"""Whether benchmarks got worse than their baseline: in speed, in bytes, in answers. Standard library only.

It does not know what was measured, nor where baselines are kept.

Speed. Machines differ and drift, so each round of a benchmark is paired with a run of one fixed calibration kernel at its side,
and what is compared is log(benchmark / calibration). A run makes many passes over all benchmarks; it is summed up by the trimmed
mean over its passes with its standard error (Yuen 1974: outliers of a busy machine weigh nothing, and the error says what is left).

Several runs. What changes from process to process and from minute to minute is in no run's own noise. Of runs of the same code the
ratios are averaged, and their noise is what they show between them: a benchmark's own spread, or that pooled over the others
where it is larger, because a few runs of one benchmark can agree by chance. A single run is held to the spread that the other
side's runs show; where neither side has four, speed cannot be judged.

Two commits measured in turns (base, head, base, head, ...) are compared turn by turn: what drifts is in both of a turn.
Two sessions on different days are not: `settle` widens their noise when most benchmarks moved more than it explains.

A change is a regression when it is above 1.14x, half-way to 1.3x, and no change at all could look like this; it passes when it is
below that and 1.3x could not look like this; otherwise it is inconclusive. Up to a noise of 2 % on each side half-way decides.

Bytes are compared exactly. KL is compared by the intervals of its mean: they must not part upwards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from harness.measure.compare import log_ratios
from harness.measure.student import student_t

SLOWDOWN = 1.3  # what must be found
NOISE_LIMIT = 0.02  # standard error of one side's log ratio up to which no change and SLOWDOWN never look alike
MIN_PASSES = 10
MIN_RUNS = 4  # of the same code, or turns of two commits, that show what differs between runs
TRIM = 0.2  # share of the passes dropped at each end
KL_FLOOR_NATS = 1e-9  # rounding in float32: below it, two answers are the same
SPEED_CONFIDENCE = 0.99999  # of one benchmark: a hundred together are wrong less than once in 1,000 comparisons
KL_CONFIDENCE = 0.99
POOL_FREEDOM = 8  # what the pooled spread is worth to one benchmark: its own is typically within a factor of 1.3 (Smyth 2004, section 3)
OUTLYING = 6.0  # a variance that many times the pooled one is no chance: the benchmark stands for itself
MANY = 20  # benchmarks whose typical change says something of the machine
TYPICAL = 0.6745  # the median distance of a normal value from its mean, in standard deviations

PASS, REGRESSION, REFUSED, INCONCLUSIVE = "pass", "regression", "refused", "inconclusive"
EXIT_CODES = {PASS: 0, REGRESSION: 1, REFUSED: 2, INCONCLUSIVE: 3}


@dataclass(frozen=True)
class Pass:
    """A few rounds of one benchmark, taken together: measured_s[i] and calibration_s[i] (seconds) side by side."""

    measured_s: Sequence[float]
    calibration_s: Sequence[float]


@dataclass(frozen=True)
class Speed:
    """A typical log ratio, benchmark to calibration kernel or one side to the other, and how well it is known."""

    log_ratio: float
    noise: float  # standard error of log_ratio
    freedom: int  # degrees of freedom of noise
    runs: int = 1
    spread: float | None = None  # standard deviation of one run among runs of the same code; None: there were too few to know


@dataclass(frozen=True)
class Mean:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True)
class Entry:
    """What one benchmark reports. None: it does not measure that."""

    bytes: dict[str, int] | None
    kl_nats: Mean | None
    speed: Speed | None


@dataclass(frozen=True)
class Finding:
    """One thing held against the baseline, and what follows. `text` is one sentence."""

    benchmark: str
    aspect: str  # presence, bytes, kl or speed
    verdict: str
    text: str


def speed(passes: Sequence[Pass]) -> Speed:
    """One run of one benchmark. ValueError for fewer than 10 passes, or one that holds no pair of positive times."""
    if len(passes) < MIN_PASSES:
        raise ValueError(f"{len(passes)} passes are too few: take {MIN_PASSES} or more")
    # Rounds of one pass see one state of the machine: they count as one.
    levels = sorted(statistics.median(log_ratios(each.measured_s, each.calibration_s, 1)) for each in passes)
    cut = int(TRIM * len(levels))
    kept = levels[cut : len(levels) - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    level = math.fsum(winsorised) / len(levels)
    squares = math.fsum((value - level) ** 2 for value in winsorised)
    noise = math.sqrt(squares / (len(kept) * (len(kept) - 1)))
    return Speed(math.fsum(kept) / len(kept), noise, len(kept) - 1)


def of_runs(runs: Sequence[Mapping[str, Speed]]) -> dict[str, Speed]:
    """Several runs, or turns, of the same benchmarks as one. One run is itself."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    if len(runs) < 2 or not names:
        return dict(runs[0])
    found = {}
    own = {name: statistics.variance(run[name].log_ratio for run in runs) for name in names}
    total = math.fsum(own.values())
    for name in names:
        pooled = (total - own[name]) / (len(names) - 1) if len(names) > 1 else own[name]  # over the others
        within = math.fsum(run[name].noise ** 2 for run in runs) / len(runs)
        # What differs between runs includes what differs within them: the largest, not their sum.
        spread = math.sqrt(max(own[name], pooled, within))
        level = math.fsum(run[name].log_ratio for run in runs) / len(runs)
        freedom = len(runs) - 1
        if own[name] <= OUTLYING * pooled:
            freedom += min((len(names) - 1) * (len(runs) - 1), POOL_FREEDOM)
        found[name] = Speed(level, spread / math.sqrt(len(runs)), freedom, len(runs), spread if len(runs) >= MIN_RUNS else None)
    return found


def changes(baseline: Mapping[str, Speed], current: Mapping[str, Speed]) -> dict[str, Speed]:
    """By how much `current` differs, benchmark by benchmark of those that both have."""
    return {name: _change(baseline[name], current[name]) for name in baseline.keys() & current.keys()}


def settle(changed: Mapping[str, Speed]) -> dict[str, Speed]:
    """Changes between two sessions, their noise widened as far as the typical change is larger than it (Birge's ratio, by the median).

    The calibration kernel is not slowed by everything that slows a benchmark. Where most benchmarks moved, the machine did, or all
    of the code: that cannot be told apart here, and measuring both commits in turns can. Fewer than 20 benchmarks stay as they are.
    """
    if len(changed) < MANY:
        return dict(changed)
    moved = [abs(change.log_ratio) / change.noise if change.noise > 0 else 0.0 for change in changed.values()]
    wider = statistics.median(moved) / TYPICAL
    if wider <= 1.0:
        return dict(changed)
    usual = statistics.median(change.noise for change in changed.values())
    return {name: replace(change, noise=wider * max(change.noise, usual)) for name, change in changed.items()}


def mean_of(samples: Sequence[float]) -> Mean:
    """The mean with its Student t interval. At least 2 samples, else ValueError."""
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} samples have no interval: give 2 or more")
    mean = math.fsum(samples) / len(samples)
    variance = math.fsum((value - mean) ** 2 for value in samples) / (len(samples) - 1)
    reach = student_t((1 + KL_CONFIDENCE) / 2, len(samples) - 1) * math.sqrt(variance / len(samples))
    return Mean(mean, mean - reach, mean + reach, len(samples))


def judge_presence(baseline: Collection[str], current: Collection[str]) -> list[Finding]:
    """Every benchmark must be on both sides: what nobody measured cannot have passed."""
    unknown = [Finding(name, "presence", REGRESSION, "is not in the baseline") for name in current if name not in baseline]
    unmeasured = [Finding(name, "presence", REGRESSION, "was not measured") for name in baseline if name not in current]
    return unknown + unmeasured


def judge_content(name: str, baseline: Entry, current: Entry) -> list[Finding]:
    """Bytes and KL of one benchmark."""
    return _judge_bytes(name, baseline.bytes, current.bytes) + _judge_kl(name, baseline.kl_nats, current.kl_nats)


def judge_speed(name: str, change: Speed) -> Finding:
    """The speed of one benchmark: by how much it changed."""
    if change.spread is None:
        said = f"takes {_ratio(change.log_ratio):.3f}x its baseline, in too few runs to show what differs between them: give {MIN_RUNS}"
        return Finding(name, "speed", INCONCLUSIVE, said)
    reach = _quantile(change.freedom) * change.noise
    ratio, low, high = (_ratio(change.log_ratio + part) for part in (0.0, -reach, reach))
    said = f"takes {ratio:.3f}x its baseline ({low:.3f} to {high:.3f}, noise {change.noise:.1%})"
    slower, half = math.log(SLOWDOWN), math.log(SLOWDOWN) / 2
    if change.log_ratio > max(half, reach):
        return Finding(name, "speed", REGRESSION, said)
    if change.log_ratio > min(half, slower - reach):
        return Finding(name, "speed", INCONCLUSIVE, f"{said}: such a noise hides {SLOWDOWN}x; add runs, or measure on a quieter machine")
    return Finding(name, "speed", PASS, said)


def unmeasured_speed(name: str, side: str) -> Finding:
    """For a benchmark that `side` ("baseline", "current run") has, without a speed."""
    return Finding(name, "speed", REGRESSION, f"has no speed in the {side}: measure it with --benchmark-enable and without xdist")


def overall(findings: Sequence[Finding]) -> str:
    """The verdict on everything: one regression is a regression, whatever could not be settled beside it."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in (REGRESSION, INCONCLUSIVE) if verdict in verdicts), PASS)


def _change(baseline: Speed, current: Speed) -> Speed:
    """The difference of two sides, each with the spread that the other may have found (Welch's degrees of freedom)."""
    sides = baseline, current
    spreads = [side.spread for side in sides if side.spread is not None]
    squares, weights = [], []
    for side in sides:
        least = max(spreads, default=0.0) / math.sqrt(side.runs)
        freedom = side.freedom if side.noise >= least else max(other.freedom for other in sides)
        squares.append(max(side.noise, least) ** 2)
        weights.append(squares[-1] ** 2 / freedom)
    total = math.fsum(squares)
    freedom = max(1, math.floor(total**2 / math.fsum(weights))) if total > 0 else min(side.freedom for side in sides)
    runs = min(side.runs for side in sides)
    return Speed(current.log_ratio - baseline.log_ratio, math.sqrt(total), freedom, runs, max(spreads, default=None))


def _ratio(log_ratio: float) -> float:
    return math.exp(min(log_ratio, 100.0))  # an interval from a few jumping runs has ends beyond any float


@lru_cache(maxsize=128)
def _quantile(freedom: int) -> float:
    return student_t(SPEED_CONFIDENCE, freedom)


def _judge_bytes(name: str, baseline: dict[str, int] | None, current: dict[str, int] | None) -> list[Finding]:
    if baseline is None and current is None:
        return []
    before, now = ({} if side is None else side for side in (baseline, current))
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if not differing:
        return [Finding(name, "bytes", PASS, "holds the same bytes")]
    return [Finding(name, "bytes", REGRESSION, f"{key} was {before.get(key)} and is {now.get(key)}") for key in differing]


def _judge_kl(name: str, baseline: Mean | None, current: Mean | None) -> list[Finding]:
    if baseline is None and current is None:
        return []
    if baseline is None or current is None:
        side = "baseline" if baseline is None else "current run"
        return [Finding(name, "kl", REGRESSION, f"has no KL in the {side}")]
    said = f"KL was {baseline.mean:.3g} nats (at most {baseline.high:.3g}) and is {current.mean:.3g} (at least {current.low:.3g})"
    worse = not current.low <= max(baseline.high, KL_FLOOR_NATS)  # NaN is worse than anything
    return [Finding(name, "kl", REGRESSION if worse else PASS, said)]
