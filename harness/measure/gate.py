"""Whether benchmarks got worse than their baseline: in speed, in bytes, in answers. Standard library only.

It does not know what was measured, nor where baselines are kept.

Speed. Machines differ and drift, so each round of a benchmark is paired with a run of one fixed calibration kernel at its side,
and what is compared is log(benchmark / calibration). A run is summed up by the trimmed mean of its log ratios with its standard
error (Yuen 1974: outliers of a busy machine weigh nothing, and the error says what is left); that error is the run's noise. With
both noises up to 2 %, a change beyond half-way to 1.3x (1.14x) is a regression: half-way is at least 4.6 standard errors from no
change and from 1.3x alike. Above that the answer is `inconclusive`, unless even the lower end of the interval is beyond 1.3x.

Several runs. What changes from process to process and from minute to minute is in no run's own noise. Of runs of the same code the
ratios are averaged, and the spread between runs, pooled over all benchmarks because three runs say little about one, joins the noise.

Bytes are compared exactly. KL is compared by the intervals of its mean: they must not part upwards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from harness.measure.compare import log_ratios
from harness.measure.student import student_t

SLOWDOWN = 1.3  # what must be found
NOISE_LIMIT = 0.02  # standard error of a run's log ratio, above which SLOWDOWN / no change cannot be told apart safely
MIN_PAIRS = 10
TRIM = 0.2  # share of the log ratios dropped at each end
KL_FLOOR_NATS = 1e-9  # rounding in float32: below it, two answers are the same
SPEED_CONFIDENCE = 0.999
KL_CONFIDENCE = 0.99

PASS, REGRESSION, REFUSED, INCONCLUSIVE = "pass", "regression", "refused", "inconclusive"
EXIT_CODES = {PASS: 0, REGRESSION: 1, REFUSED: 2, INCONCLUSIVE: 3}


@dataclass(frozen=True)
class Speed:
    """One run of one benchmark against the calibration kernel: its typical log ratio, the standard error of that, and how many pairs."""

    log_ratio: float
    noise: float
    pairs: int

    @property
    def freedom(self) -> int:
        """Degrees of freedom of `noise`: the pairs left by trimming, less one."""
        return self.pairs - 2 * _cut(self.pairs) - 1


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


def speed(measured: Sequence[float], calibration: Sequence[float]) -> Speed:
    """The typical ratio of a run; measured[i] and calibration[i] (seconds) were taken side by side. At least 10 pairs, else ValueError."""
    logs = sorted(log_ratios(measured, calibration, MIN_PAIRS))
    cut = _cut(len(logs))
    kept = logs[cut : len(logs) - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    level = math.fsum(winsorised) / len(logs)
    squares = math.fsum((value - level) ** 2 for value in winsorised)
    noise = math.sqrt(squares / (len(kept) * (len(kept) - 1)))
    return Speed(math.fsum(kept) / len(kept), noise, len(logs))


def of_runs(runs: Sequence[Mapping[str, Speed]]) -> dict[str, Speed]:
    """Several runs of the same benchmarks as one, each benchmark's noise with what all of them show between runs. One run is itself."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    if len(runs) < 2 or not names:
        return dict(runs[0])
    levels = {name: math.fsum(run[name].log_ratio for run in runs) / len(runs) for name in names}
    squares = math.fsum((run[name].log_ratio - levels[name]) ** 2 for run in runs for name in names)
    between = squares / (len(names) * (len(runs) - 1))  # the variance of one run
    within = {name: math.fsum(run[name].noise ** 2 for run in runs) / len(runs) for name in names}
    pairs = {name: sum(run[name].pairs for run in runs) for name in names}
    # What differs between runs includes what differs within them: the larger of the two, not their sum.
    return {name: Speed(levels[name], math.sqrt(max(between, within[name]) / len(runs)), pairs[name]) for name in names}


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


def judge_speed(name: str, baseline: Entry, current: Entry) -> Finding:
    """The speed of one benchmark."""
    if baseline.speed is None or current.speed is None:
        side = "baseline" if baseline.speed is None else "current run"
        return Finding(name, "speed", REGRESSION, f"has no speed in the {side}: measure it with --benchmark-enable and without xdist")
    change, reach = _change(baseline.speed, current.speed)
    noise = max(baseline.speed.noise, current.speed.noise)
    ratio, low, high = (math.exp(value) for value in (change, change - reach, change + reach))
    said = f"takes {ratio:.3f}x its baseline ({low:.3f} to {high:.3f}, noise {noise:.1%})"
    if change - reach > math.log(SLOWDOWN):
        return Finding(name, "speed", REGRESSION, said)
    if noise > NOISE_LIMIT:
        return Finding(
            name, "speed", INCONCLUSIVE, f"{said}: a noise above {NOISE_LIMIT:.0%} hides {SLOWDOWN}x; measure on a quieter machine"
        )
    return Finding(name, "speed", REGRESSION if change > math.log(SLOWDOWN) / 2 else PASS, said)


def overall(findings: Sequence[Finding]) -> str:
    """The verdict on everything: one regression is a regression, whatever could not be settled beside it."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in (REGRESSION, INCONCLUSIVE) if verdict in verdicts), PASS)


def _cut(pairs: int) -> int:
    return int(TRIM * pairs)


def _change(baseline: Speed, current: Speed) -> tuple[float, float]:
    """The change of the log ratio, and the reach of its interval to one side (Yuen's test, Welch's degrees of freedom)."""
    change = current.log_ratio - baseline.log_ratio
    squares = baseline.noise**2, current.noise**2
    total = math.fsum(squares)
    if total == 0.0:
        return change, 0.0
    freedom = total**2 / (squares[0] ** 2 / baseline.freedom + squares[1] ** 2 / current.freedom)
    return change, _quantile(max(1, math.floor(freedom))) * math.sqrt(total)


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
