"""Lines through latencies, and the context at which one strategy starts to win."""

from __future__ import annotations

import math
import random

import pytest

from harness.measure.compare import break_even, fit

CONTEXTS = range(128, 4097, 128)


def line(intercept_s, slope_s, noise_s=0.0, seed=0):
    rng = random.Random(seed)
    return fit([(x, intercept_s + slope_s * x + rng.gauss(0.0, noise_s)) for x in CONTEXTS])


def test_a_line_without_noise_is_found_exactly():
    found = line(6.44e-3, 4.37e-8)
    assert (found.intercept_s, found.slope_s) == pytest.approx((6.44e-3, 4.37e-8))
    assert found.at(1000) == pytest.approx(6.44e-3 + 4.37e-5)


def test_coefficients_and_intervals_agree_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = random.Random(4)
    points = [(x, 5e-3 + 1e-6 * x + rng.gauss(0, 1e-4)) for x in CONTEXTS]
    found, other = fit(points), stats.linregress(*zip(*points, strict=True))
    t = stats.t.ppf(0.975, len(points) - 2)
    assert (found.slope_s, found.intercept_s) == pytest.approx((other.slope, other.intercept))
    assert found.slope_high_s - found.slope_s == pytest.approx(t * other.stderr)
    assert found.intercept_s - found.intercept_low_s == pytest.approx(t * other.intercept_stderr)


def test_fit_intervals_cover_the_truth_at_the_nominal_rate():
    covered = 0
    for seed in range(600):
        found = line(5e-3, 1e-6, 2e-4, seed)
        covered += found.slope_low_s <= 1e-6 <= found.slope_high_s
    assert abs(covered - 570) <= 4 * math.sqrt(600 * 0.05 * 0.95)


def test_a_line_needs_three_points_and_two_contexts():
    with pytest.raises(ValueError, match="2 points are too few"):
        fit([(1, 1.0), (2, 2.0)])
    with pytest.raises(ValueError, match="all 3 points have the context 5"):
        fit([(5, 1.0), (5, 2.0), (5, 3.0)])


def test_the_published_break_even_of_two_slopes():
    found = break_even(line(6.44e-3, 4.37e-8), line(6.58e-3, 2.37e-8), limit=100_000)
    assert found.outcome == "from"
    assert found.context == pytest.approx(7000)
    assert (found.low, found.high) == pytest.approx((7000, 7000))
    assert found.conclusive


def test_a_strategy_that_wins_only_short_contexts_says_until():
    found = break_even(line(6.58e-3, 2.37e-8), line(6.44e-3, 4.37e-8), limit=100_000)
    assert (found.outcome, found.conclusive) == ("until", True)
    assert found.context == pytest.approx(7000)


def test_always_and_never_are_plain_data_without_a_number():
    cheap, dear = line(1e-3, 1e-8), line(2e-3, 2e-8)
    for a, b, outcome in ((dear, cheap, "always"), (cheap, dear, "never")):
        found = break_even(a, b, limit=4096)
        assert (found.outcome, found.context, found.low, found.high, found.conclusive) == (outcome, None, None, None, True)


def test_a_crossing_beyond_the_limit_is_never():
    assert break_even(line(6.44e-3, 4.37e-8), line(6.58e-3, 2.37e-8), limit=4096).outcome == "never"


def test_a_line_does_not_beat_itself():
    found = break_even(line(1e-3, 1e-7), line(1e-3, 1e-7), limit=4096)
    assert (found.outcome, found.conclusive) == ("never", False)


def test_noise_that_hides_the_difference_is_not_conclusive():
    found = break_even(line(5e-3, 1.00e-7, 1e-3, seed=1), line(5e-3, 1.01e-7, 1e-3, seed=2), limit=4096)
    assert not found.conclusive


def test_the_break_even_interval_covers_the_truth_at_the_nominal_rate():
    covered = 0
    for seed in range(600):
        a, b = line(5.0e-3, 2.0e-6, 2e-4, 2 * seed), line(7.0e-3, 1.0e-6, 2e-4, 2 * seed + 1)  # they cross at 2,000
        found = break_even(a, b, limit=100_000)
        covered += found.outcome == "from" and found.low <= 2000 <= found.high
    assert abs(covered - 570) <= 4 * math.sqrt(600 * 0.05 * 0.95)


def test_the_limit_must_be_positive():
    with pytest.raises(ValueError, match="limit=0"):
        break_even(line(1, 1), line(1, 2), limit=0)


def test_fits_of_different_confidence_are_not_compared():
    points = [(x, 1.0 + x) for x in range(5)]
    with pytest.raises(ValueError, match="different confidence"):
        break_even(fit(points, 0.9), fit(points), limit=10)
