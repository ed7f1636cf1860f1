"""The gate's statistics: what a busy machine may not do to them, and what they must find, on simulated timings."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from harness.measure.gate import (
    INCONCLUSIVE,
    KL_FLOOR_NATS,
    NOISE_LIMIT,
    PASS,
    REGRESSION,
    Entry,
    Finding,
    Mean,
    Speed,
    judge_content,
    judge_presence,
    judge_speed,
    mean_of,
    overall,
    speed,
)

DRAWS = 1000
PAIRS = 25


def session(rng: random.Random, noise: float, slower: float = 1.0, drift: float = 0.5, spikes: float = 0.0) -> Entry:
    """One run: pairs whose log ratios have the standard deviation `noise`, on a machine whose own speed drifts by `drift`."""
    machine = math.exp(rng.gauss(0.0, drift))
    calibration = [machine * math.exp(rng.gauss(0.0, 0.1)) for _ in range(PAIRS)]
    measured = [3.0 * slower * c * math.exp(rng.gauss(0.0, noise)) * (5.0 if rng.random() < spikes else 1.0) for c in calibration]
    return Entry(None, None, speed(measured, calibration))


def verdicts(noise: float, slower: float, draws: int = DRAWS, spikes: float = 0.0) -> list[str]:
    rng = random.Random(f"{noise} {slower} {spikes}")
    return [judge_speed("b", session(rng, noise, spikes=spikes), session(rng, noise, slower, spikes=spikes)).verdict for _ in range(draws)]


@pytest.mark.parametrize("noise", [0.003, 0.01, 0.02])
def test_no_change_never_fails_at_paired_noise_up_to_two_percent(noise):
    assert verdicts(noise, 1.0) == [PASS] * DRAWS


@pytest.mark.parametrize("noise", [0.003, 0.01, 0.02])
def test_a_slow_down_of_1_3_always_fails_at_paired_noise_up_to_two_percent(noise):
    assert verdicts(noise, 1.3) == [REGRESSION] * DRAWS


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.26, 1.0])
def test_a_noisy_machine_never_makes_a_regression(noise):
    assert REGRESSION not in verdicts(noise, 1.0)


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.26, 1.0])
def test_a_noisy_machine_never_hides_a_slow_down_behind_a_pass(noise):
    assert verdicts(noise, 1.3).count(PASS) <= DRAWS // 1000


def test_a_noise_of_26_percent_a_pair_is_inconclusive():
    assert verdicts(0.26, 1.0).count(INCONCLUSIVE) >= 0.999 * DRAWS
    assert verdicts(0.26, 1.3).count(INCONCLUSIVE) >= 0.99 * DRAWS


def test_noise_at_the_limit_on_both_sides_still_tells_1_3_from_no_change():
    """The strictest reading: the summaries themselves, not their pairs, scatter by 2 %."""
    rng = random.Random(3)

    def side(level: float) -> Entry:
        return Entry(None, None, Speed(rng.gauss(level, NOISE_LIMIT), NOISE_LIMIT, PAIRS))

    for _ in range(DRAWS):
        assert judge_speed("b", side(0.0), side(0.0)).verdict == PASS
        assert judge_speed("b", side(0.0), side(math.log(1.3))).verdict == REGRESSION


def test_one_round_in_ten_that_takes_five_times_as_long_changes_nothing():
    assert verdicts(0.01, 1.0, spikes=0.1).count(REGRESSION) == 0
    assert verdicts(0.01, 1.3, spikes=0.1).count(PASS) == 0
    assert verdicts(0.01, 1.3, spikes=0.1).count(REGRESSION) >= 0.9 * DRAWS


def test_a_huge_slow_down_fails_on_a_noisy_machine_too():
    assert verdicts(0.2, 4.0) == [REGRESSION] * DRAWS


def test_a_faster_benchmark_passes():
    assert verdicts(0.02, 0.5, draws=100) == [PASS] * 100


def test_the_noise_of_a_run_is_the_standard_error_of_its_typical_ratio():
    rng = random.Random(1)
    runs = [session(rng, 0.05).speed for _ in range(DRAWS)]
    scatter = math.sqrt(sum((run.log_ratio - math.log(3.0)) ** 2 for run in runs) / DRAWS)
    claimed = math.sqrt(sum(run.noise**2 for run in runs) / DRAWS)
    assert claimed == pytest.approx(scatter, rel=0.1)


def test_the_typical_ratio_and_its_noise_agree_with_scipy():
    rng = random.Random(2)
    logs = [rng.gauss(0.5, 0.3) for _ in range(30)]
    got = speed([math.exp(value) for value in logs], [1.0] * 30)
    assert got.log_ratio == pytest.approx(stats.trim_mean(logs, 0.2))
    assert got.noise == pytest.approx(stats.mstats.trimmed_stde(logs, limits=(0.2, 0.2)), rel=0.05)


def test_the_interval_agrees_with_yuens_test_in_scipy():
    rng = random.Random(5)
    before, after = ([math.exp(rng.gauss(level, 0.02)) for _ in range(PAIRS)] for level in (0.0, 0.05))
    ones = [1.0] * PAIRS
    finding = judge_speed("b", Entry(None, None, speed(before, ones)), Entry(None, None, speed(after, ones)))
    yuen = stats.ttest_ind([math.log(x) for x in after], [math.log(x) for x in before], equal_var=False, trim=0.2)
    change = speed(after, ones).log_ratio - speed(before, ones).log_ratio
    error = math.hypot(speed(after, ones).noise, speed(before, ones).noise)
    assert change / error == pytest.approx(yuen.statistic)
    reach = stats.t.ppf(0.999, math.floor(yuen.df)) * error
    assert f"({math.exp(change - reach):.3f} to {math.exp(change + reach):.3f}," in finding.text


def test_too_few_pairs_are_refused():
    with pytest.raises(ValueError, match="9 pairs are too few"):
        speed([1.0] * 9, [1.0] * 9)


def test_a_benchmark_without_a_speed_on_one_side_fails():
    with_speed, without = Entry(None, None, Speed(0.0, 0.01, PAIRS)), Entry(None, None, None)
    assert judge_speed("b", with_speed, without).verdict == REGRESSION
    assert judge_speed("b", without, with_speed).verdict == REGRESSION


def content(bytes_held: dict[str, int] | None = None, kl: Mean | None = None) -> Entry:
    return Entry(bytes_held, kl, None)


@pytest.mark.parametrize("now", [{"k": 101, "v": 5}, {"k": 99, "v": 5}, {"k": 100}, {"k": 100, "v": 5, "w": 0}, None])
def test_one_byte_more_or_less_fails(now):
    findings = judge_content("b", content({"k": 100, "v": 5}), content(now))
    assert {finding.verdict for finding in findings} == {REGRESSION}
    assert {finding.aspect for finding in findings} == {"bytes"}


def test_the_same_bytes_pass():
    assert [f.verdict for f in judge_content("b", content({"k": 100}), content({"k": 100}))] == [PASS]


def test_a_kl_fails_only_when_its_interval_lies_above_the_baselines():
    baseline = content(kl=Mean(0.10, 0.08, 0.12, 96))
    for low, verdict in ((0.119, PASS), (0.121, REGRESSION)):
        assert [f.verdict for f in judge_content("b", baseline, content(kl=Mean(low + 0.01, low, low + 0.02, 96)))] == [verdict]


def test_a_kl_below_rounding_is_no_kl():
    exact, rounded, wrong = (content(kl=Mean(value, value, value, 96)) for value in (0.0, KL_FLOOR_NATS / 2, 2 * KL_FLOOR_NATS))
    assert [f.verdict for f in judge_content("b", exact, rounded)] == [PASS]
    assert [f.verdict for f in judge_content("b", exact, wrong)] == [REGRESSION]


@pytest.mark.parametrize("now", [None, Mean(math.nan, math.nan, math.nan, 96)])
def test_a_kl_that_vanished_or_is_no_number_fails(now):
    findings = judge_content("b", content(kl=Mean(0.1, 0.08, 0.12, 96)), content(kl=now))
    assert [finding.verdict for finding in findings] == [REGRESSION]


def test_the_interval_of_a_mean_agrees_with_scipy():
    samples = [0.1, 0.4, 0.2, 0.9, 0.3]
    low, high = stats.t.interval(0.99, 4, loc=sum(samples) / 5, scale=stats.sem(samples))
    got = mean_of(samples)
    assert (got.mean, got.low, got.high, got.samples) == (pytest.approx(0.38), pytest.approx(low), pytest.approx(high), 5)


def test_a_benchmark_missing_on_either_side_fails():
    assert [(f.benchmark, f.verdict) for f in judge_presence(["a", "b"], ["b", "c"])] == [("c", REGRESSION), ("a", REGRESSION)]
    assert judge_presence(["a"], ["a"]) == []


def test_a_regression_outweighs_what_could_not_be_settled():
    findings = [Finding("b", "speed", verdict, "") for verdict in (PASS, INCONCLUSIVE, REGRESSION)]
    assert [overall(findings[:count]) for count in (0, 1, 2, 3)] == [PASS, PASS, INCONCLUSIVE, REGRESSION]
