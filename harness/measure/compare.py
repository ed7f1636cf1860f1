"""Whether two costs differ, by how much, and from which context on. Standard library only.

It does not know what was measured, only which way is better.

Machine noise multiplies and drifts, so samples are taken in interleaved pairs and compared as log ratios: the drift cancels
within a pair. With few pairs the interval is Student's t; a percentile bootstrap is far too narrow there and needs 40.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from harness.measure.metrics import quantile
from harness.measure.student import student_t

MIN_PAIRS = 5
MIN_BOOTSTRAP_PAIRS = 40
LOWER, HIGHER = "lower", "higher"
FASTER, SLOWER, INDISTINGUISHABLE = "faster", "slower", "indistinguishable"

BETTER = {
    "ttft_s": LOWER,
    "itl_s": LOWER,
    "e2e_s": LOWER,
    "wall_s": LOWER,
    "prefill_tok_per_s": HIGHER,
    "decode_tok_per_s": HIGHER,
    "output_tok_per_s": HIGHER,
}


@dataclass(frozen=True)
class Interval:
    """A ratio (measured / reference, geometric mean over the pairs) with its confidence interval."""

    ratio: float
    low: float
    high: float
    pairs: int
    confidence: float


@dataclass(frozen=True)
class Comparison:
    """One metric against the reference: the interval, the noise floor it was held against, and what follows.

    `detectable` is the smallest relative difference (0.01 = 1 %) that as many pairs of this spread find 8 times in 10; a
    difference must exceed the noise floor as well.
    """

    interval: Interval
    noise_floor: float | None  # smallest relative difference that means anything, 0.01 = 1 %; None = not measured
    verdict: str  # faster, slower or indistinguishable
    detectable: float

    def as_dict(self) -> dict[str, object]:
        """The form a record stores."""
        interval = asdict(self.interval)
        return {**interval, "verdict": self.verdict, "noise_floor": self.noise_floor, "detectable": self.detectable}


def compare(
    measured: Sequence[float], reference: Sequence[float], better: str, noise_floor: float | None = None, confidence: float = 0.95
) -> Comparison:
    """The verdict on pairs of samples; measured[i] and reference[i] were taken side by side.

    Different means that the interval excludes 1 AND the ratio is further from 1 than the noise floor.
    """
    if better not in (LOWER, HIGHER):
        raise ValueError(f"better={better!r}: use {LOWER!r} (times) or {HIGHER!r} (rates)")
    interval = paired_interval(measured, reference, confidence)
    return Comparison(interval, noise_floor, _verdict(interval, better, noise_floor), minimum_detectable_effect(measured, reference))


def paired_interval(measured: Sequence[float], reference: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student t interval of the mean log ratio, given back as a ratio. At least 5 pairs of positive numbers, else ValueError."""
    logs = log_ratios(measured, reference, MIN_PAIRS)
    mean, error = _mean_and_error(logs)
    reach = student_t((1 + confidence) / 2, len(logs) - 1) * error
    return Interval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(logs), confidence)


def bootstrap_interval(
    measured: Sequence[float], reference: Sequence[float], seed: int, confidence: float = 0.95, draws: int = 2000
) -> Interval:
    """Percentile bootstrap of the mean log ratio (Efron 1979), for skewed noise. At least 40 pairs, else ValueError."""
    logs = log_ratios(measured, reference, MIN_BOOTSTRAP_PAIRS)
    rng = random.Random(seed)
    means = [math.fsum(rng.choices(logs, k=len(logs))) / len(logs) for _ in range(draws)]
    low, high = quantile(means, (1 - confidence) / 2), quantile(means, (1 + confidence) / 2)
    return Interval(math.exp(math.fsum(logs) / len(logs)), math.exp(low), math.exp(high), len(logs), confidence)


def noise_floor(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> float:
    """The largest relative difference that the same thing measured twice, in pairs, is still compatible with (0.01 = 1 %)."""
    interval = paired_interval(first, second, confidence)
    return math.exp(max(abs(math.log(interval.low)), abs(math.log(interval.high)))) - 1.0


def minimum_detectable_effect(
    measured: Sequence[float], reference: Sequence[float], pairs: int | None = None, confidence: float = 0.95, power: float = 0.8
) -> float:
    """The smallest relative difference (0.01 = 1 %) that `pairs` such pairs (None = as many as given) find with this power."""
    logs = log_ratios(measured, reference, MIN_PAIRS)
    pairs = len(logs) if pairs is None else pairs
    if pairs < MIN_PAIRS:
        raise ValueError(f"pairs={pairs}: a comparison needs {MIN_PAIRS} or more")
    spread = _mean_and_error(logs)[1] * math.sqrt(len(logs))
    return detectable(spread / math.sqrt(pairs), pairs, confidence, power)


def detectable(error: float, samples: int, confidence: float = 0.95, power: float = 0.8) -> float:
    """The relative difference (0.01 = 1 %) that this standard error of a mean log ratio lets be found with this power."""
    return math.expm1((student_t((1 + confidence) / 2, samples - 1) + student_t(power, samples - 1)) * error)


@dataclass(frozen=True)
class Fit:
    """ITL = intercept_s + slope_s * context by least squares, with the covariance that intervals and break-even need."""

    intercept_s: float
    slope_s: float  # seconds per token of context
    intercept_low_s: float
    intercept_high_s: float
    slope_low_s: float
    slope_high_s: float
    points: int
    confidence: float
    variance_intercept: float
    variance_slope: float
    covariance: float

    def at(self, context: float) -> float:
        """Seconds the line gives at this context."""
        return self.intercept_s + self.slope_s * context


def fit(points: Sequence[tuple[float, float]], confidence: float = 0.95) -> Fit:
    """The line through (context, seconds) points. ValueError for fewer than 3 points or a single context."""
    if len(points) < 3:
        raise ValueError(f"{len(points)} points are too few for a line with intervals: give 3 or more")
    n = len(points)
    middle = math.fsum(x for x, _ in points) / n
    level = math.fsum(y for _, y in points) / n
    spread = math.fsum((x - middle) ** 2 for x, _ in points)
    if spread == 0.0:
        raise ValueError(f"all {n} points have the context {points[0][0]}: a line needs two contexts or more")
    slope = math.fsum((x - middle) * (y - level) for x, y in points) / spread
    intercept = level - slope * middle
    variance = math.fsum((y - intercept - slope * x) ** 2 for x, y in points) / (n - 2)
    variance_slope = variance / spread
    variance_intercept = variance / n + middle * middle * variance_slope
    t = student_t((1 + confidence) / 2, n - 2)
    reach_a, reach_b = t * math.sqrt(variance_intercept), t * math.sqrt(variance_slope)
    return Fit(
        *(intercept, slope, intercept - reach_a, intercept + reach_a, slope - reach_b, slope + reach_b),
        *(n, confidence, variance_intercept, variance_slope, -middle * variance_slope),
    )


@dataclass(frozen=True)
class BreakEven:
    """Where, between context 0 and `limit`, line B is below line A.

    outcome: "from" (B wins from `context` on), "until" (B wins up to it), "always" or "never"; `context` is None for the last two.
    low..high is the part of the range around the crossing where the sign of the difference is not settled; both None without
    a crossing. conclusive: whether the intervals support the outcome, and not only the lines themselves.
    """

    outcome: str
    context: float | None
    low: float | None
    high: float | None
    limit: float
    conclusive: bool


def break_even(a: Fit, b: Fit, limit: float) -> BreakEven:
    """The context at which B starts (or stops) to win over A, with an interval after Fieller (1954)."""
    if limit <= 0:
        raise ValueError(f"limit={limit}: give the longest context of interest, above 0")
    if a.confidence != b.confidence:
        raise ValueError(f"the fits have different confidence, {a.confidence} and {b.confidence}: fit both with one")
    gain, gain_slope = a.intercept_s - b.intercept_s, a.slope_s - b.slope_s  # B wins where gain + gain_slope * context > 0
    at_start, at_limit = gain > 0, gain + gain_slope * limit > 0
    unsettled = _unsettled(a, b, limit)
    if at_start == at_limit:
        return BreakEven("always" if at_start else "never", None, None, None, limit, conclusive=not unsettled)
    crossing = min(limit, max(0.0, -gain / gain_slope))
    low, high = next((piece for piece in unsettled if piece[0] <= crossing <= piece[1]), (crossing, crossing))
    conclusive = low > 0.0 and high < limit and len(unsettled) <= 1
    return BreakEven("from" if at_limit else "until", crossing, low, high, limit, conclusive)


def log_ratios(measured: Sequence[float], reference: Sequence[float], at_least: int) -> list[float]:
    """log(measured / reference) pair by pair. ValueError for unequal lengths, too few pairs, or a value that is not positive."""
    if len(measured) != len(reference):
        raise ValueError(f"{len(measured)} measured and {len(reference)} reference samples do not make pairs")
    if len(measured) < at_least:
        raise ValueError(f"{len(measured)} pairs are too few: take {at_least} or more")
    for value in (*measured, *reference):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"sample {value} cannot be compared: samples must be finite and above 0")
    return [math.log(m) - math.log(r) for m, r in zip(measured, reference, strict=True)]


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def _unsettled(a: Fit, b: Fit, limit: float) -> list[tuple[float, float]]:
    """The contexts in 0..limit where the difference of the lines is within its own interval, as at most two pieces.

    There square * x^2 + 2 * half * x + constant <= 0: the squared difference against t^2 times its variance.
    """
    freedom = a.points + b.points - 4
    t2 = student_t((1 + a.confidence) / 2, freedom) ** 2
    gain, gain_slope = a.intercept_s - b.intercept_s, a.slope_s - b.slope_s
    square = gain_slope**2 - t2 * (a.variance_slope + b.variance_slope)
    half = gain * gain_slope - t2 * (a.covariance + b.covariance)
    constant = gain**2 - t2 * (a.variance_intercept + b.variance_intercept)
    pieces = _at_most_zero(square, half, constant)
    clipped = [(max(0.0, low), min(limit, high)) for low, high in pieces]
    return [(low, high) for low, high in clipped if low <= high]


def _at_most_zero(square: float, half: float, constant: float) -> list[tuple[float, float]]:
    """Where square * x^2 + 2 * half * x + constant <= 0, as intervals that may be infinite."""
    everywhere = [(-math.inf, math.inf)]
    if square == 0.0:
        if half == 0.0:
            return everywhere if constant <= 0.0 else []
        root = -constant / (2 * half)
        return [(-math.inf, root)] if half > 0 else [(root, math.inf)]
    inside = half * half - square * constant
    if inside < 0.0:
        return [] if square > 0 else everywhere
    first, second = sorted(((-half - math.sqrt(inside)) / square, (-half + math.sqrt(inside)) / square))
    return [(first, second)] if square > 0 else [(-math.inf, first), (second, math.inf)]


def _verdict(interval: Interval, better: str, noise_floor: float | None) -> str:
    if interval.low <= 1.0 <= interval.high:
        return INDISTINGUISHABLE
    if noise_floor is not None and abs(math.log(interval.ratio)) <= math.log1p(noise_floor):
        return INDISTINGUISHABLE
    return FASTER if (interval.ratio < 1.0) == (better == LOWER) else SLOWER
