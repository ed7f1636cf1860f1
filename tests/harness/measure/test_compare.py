"""The comparison is right about noise: nominal false alarms, nominal coverage, planted effects found."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest

from harness.measure import compare as c
from harness.measure.student import student_t

DRAWS = 2000


def pairs(rng, count, effect=1.0, noise=0.02, drift=0.3):
    """`count` interleaved samples whose shared machine drift is far larger than the noise within a pair."""
    measured, reference = [], []
    for _ in range(count):
        base = math.exp(rng.gauss(0.0, drift))
        measured.append(base * effect * math.exp(rng.gauss(0.0, noise)))
        reference.append(base * math.exp(rng.gauss(0.0, noise)))
    return measured, reference


def within_binomial(hits, share, draws=DRAWS):
    """Whether `hits` is within 4 standard errors of its expectation."""
    return abs(hits - share * draws) <= 4 * math.sqrt(draws * share * (1 - share))


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 29, 100, 1001])
def test_student_quantiles_agree_with_scipy(freedom):
    stats = pytest.importorskip("scipy.stats")
    for share in (0.001, 0.025, 0.5, 0.8, 0.975, 0.9995):
        assert student_t(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-9, abs=1e-9)


def test_student_quantiles_of_the_printed_tables():
    for freedom, printed in {1: 12.706, 4: 2.776, 9: 2.262, 30: 2.042}.items():
        assert student_t(0.975, freedom) == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize("count", [5, 12])
def test_a_against_a_is_called_different_at_the_nominal_rate(count):
    rng = random.Random(count)
    verdicts = [c.compare(*pairs(rng, count), c.LOWER).verdict for _ in range(DRAWS)]
    assert within_binomial(sum(verdict != c.INDISTINGUISHABLE for verdict in verdicts), 0.05)


@pytest.mark.parametrize("noise", [0.003, 0.26])
def test_a_gate_at_high_confidence_never_fails_a_against_a(noise):
    rng = random.Random(5)
    alarms = sum(c.compare(*pairs(rng, 30, noise=noise), c.LOWER, confidence=1 - 1e-7).verdict == c.SLOWER for _ in range(1000))
    assert alarms == 0


@pytest.mark.parametrize("effect", [0.9, 1.0, 1.3])
def test_the_interval_covers_the_truth_at_the_nominal_rate(effect):
    rng = random.Random(11)
    covered = 0
    for _ in range(DRAWS):
        interval = c.paired_interval(*pairs(rng, 5, effect))
        covered += interval.low <= effect <= interval.high
    assert within_binomial(covered, 0.95)


def test_a_planted_effect_is_found_each_time():
    rng = random.Random(2)
    for _ in range(200):
        measured, reference = pairs(rng, 8, effect=1.3, noise=0.01)
        assert c.compare(measured, reference, c.LOWER).verdict == c.SLOWER
        assert c.compare(measured, reference, c.HIGHER).verdict == c.FASTER
        assert c.compare(reference, measured, c.LOWER).verdict == c.FASTER
        assert c.compare(reference, measured, c.HIGHER).verdict == c.SLOWER


def test_the_known_interval_of_five_pairs():
    measured = [math.exp(value) for value in (0.1, 0.2, 0.3, 0.4, 0.5)]
    interval = c.paired_interval(measured, [1.0] * 5)
    reach = 2.7764451 * math.sqrt(0.025 / 5)
    assert interval.ratio == pytest.approx(math.exp(0.3))
    assert (interval.low, interval.high) == pytest.approx((math.exp(0.3 - reach), math.exp(0.3 + reach)))
    assert interval.pairs == 5


def test_ratios_turn_over_when_the_sides_are_swapped():
    measured, reference = pairs(random.Random(1), 9, effect=1.1)
    there, back = c.paired_interval(measured, reference), c.paired_interval(reference, measured)
    assert (back.ratio, back.low, back.high) == pytest.approx((1 / there.ratio, 1 / there.high, 1 / there.low))


def test_an_effect_below_the_noise_floor_means_nothing():
    measured, reference = [1.02, 1.021, 1.019, 1.02, 1.02], [1.0] * 5
    assert c.compare(measured, reference, c.LOWER).verdict == c.SLOWER
    assert c.compare(measured, reference, c.LOWER, noise_floor=0.05).verdict == c.INDISTINGUISHABLE
    assert c.compare(measured, reference, c.LOWER, noise_floor=0.01).verdict == c.SLOWER
    assert c.compare(reference, measured, c.LOWER, noise_floor=0.05).verdict == c.INDISTINGUISHABLE


def test_the_noise_floor_covers_what_a_against_a_shows():
    rng = random.Random(7)
    floors = [c.noise_floor(*pairs(rng, 10, noise=0.02)) for _ in range(DRAWS)]
    shown = [abs(math.log(c.paired_interval(*pairs(rng, 10, noise=0.02)).ratio)) for _ in range(DRAWS)]
    exceeded = sum(effect > math.log1p(floor) for effect, floor in zip(shown, floors, strict=True))
    assert exceeded / DRAWS < 0.05
    assert sorted(floors)[DRAWS // 2] < 0.05


def test_the_detectable_effect_is_detected_with_the_stated_power():
    rng = random.Random(13)
    spread = 0.02 * math.sqrt(2)
    effect = 1 + c.minimum_detectable_effect([math.exp(spread * z) for z in (-1.0, 1.0) * 50], [1.0] * 100, pairs=10)
    found = sum(c.compare(*pairs(rng, 10, effect), c.LOWER).verdict == c.SLOWER for _ in range(500))
    assert 0.74 < found / 500 < 0.90


def test_forty_comparisons_of_a_strategy_with_itself_rarely_differ_and_a_tenth_slower_is_always_seen():
    def verdicts(effect, noise):
        rng = random.Random(11)
        found = []
        for _ in range(40):
            measured, reference = pairs(rng, 7, effect, noise)
            twin = [value * math.exp(rng.gauss(0.0, noise)) for value in reference]
            found.append(c.compare(measured, reference, c.LOWER, c.noise_floor(twin, reference)).verdict)
        return found

    assert 40 - verdicts(1.0, 0.05).count(c.INDISTINGUISHABLE) <= 5
    assert verdicts(1.1, 0.01) == [c.SLOWER] * 40


def test_a_comparison_says_what_it_could_have_found():
    rng = random.Random(5)
    noise = [math.exp(rng.gauss(0.0, 0.02)) for _ in range(10)]
    found = c.compare(noise, [1.0] * 10, "lower")
    assert found.detectable == c.minimum_detectable_effect(noise, [1.0] * 10)
    assert found.as_dict()["detectable"] == found.detectable


def test_four_pairs_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="4 pairs are too few: take 5 or more"):
        c.paired_interval([1.0] * 4, [1.0] * 4)


def test_a_bootstrap_needs_forty_pairs_and_covers_the_truth_with_them():
    with pytest.raises(ValueError, match="39 pairs are too few: take 40 or more"):
        c.bootstrap_interval([1.0] * 39, [1.0] * 39, seed=0)
    rng = random.Random(17)
    covered = 0
    for draw in range(150):
        interval = c.bootstrap_interval(*pairs(rng, 40, 1.1), seed=draw, draws=200)
        covered += interval.low <= 1.1 <= interval.high
    assert covered / 150 > 0.86
    samples = pairs(rng, 40)
    assert c.bootstrap_interval(*samples, seed=0, draws=50) == c.bootstrap_interval(*samples, seed=0, draws=50)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_samples_that_are_not_positive_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="cannot be compared"):
        c.paired_interval([1.0, 1.0, bad, 1.0, 1.0], [1.0] * 5)


def test_unequal_lengths_are_not_pairs():
    with pytest.raises(ValueError, match="5 measured and 6 reference"):
        c.paired_interval([1.0] * 5, [1.0] * 6)


def test_the_direction_must_be_named():
    with pytest.raises(ValueError, match="'down'"):
        c.compare([1.0] * 5, [1.0] * 5, "down")


def test_equal_samples_are_indistinguishable():
    found = c.compare([2.0] * 5, [2.0] * 5, c.HIGHER)
    assert found.verdict == c.INDISTINGUISHABLE
    assert found.as_dict() == {
        "ratio": 1.0,
        "low": 1.0,
        "high": 1.0,
        "pairs": 5,
        "confidence": 0.95,
        "verdict": "indistinguishable",
        "noise_floor": None,
        "detectable": 0.0,
    }


def test_measurement_arithmetic_loads_no_torch():
    code = (
        "import sys; from harness.measure import compare, metrics, record, clock, environment, memory; import harness.report.__main__;"
        "print(sorted({'torch', 'rich', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
