"""The gate's statistics: what a busy machine may not do to them, and what they must find, on simulated timings."""

from __future__ import annotations

import math
import random
from dataclasses import replace

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
    Pass,
    Speed,
    changes,
    judge_content,
    judge_presence,
    judge_speed,
    mean_of,
    overall,
    speed,
)

DRAWS = 1000
PASSES, ROUNDS = 20, 3
SLOWER = math.log(1.3)


def run(rng: random.Random, noise: float, drift: float = 0.5, spikes: float = 0.0) -> Speed:
    """One run: passes whose log ratios have the standard deviation `noise`, on a machine whose own speed drifts by `drift`."""

    def one_pass() -> Pass:
        state = rng.gauss(0.0, noise)  # shared by the rounds of a pass
        calibration = [math.exp(rng.gauss(0.0, drift)) for _ in range(ROUNDS)]
        spiked = [5.0 if rng.random() < spikes else 1.0 for _ in calibration]
        return Pass(
            [3.0 * c * spike * math.exp(state + rng.gauss(0.0, noise / 3)) for c, spike in zip(calibration, spiked, strict=True)],
            calibration,
        )

    return speed([one_pass() for _ in range(PASSES)])


def verdicts(noise: float, slower: float = 0.0, draws: int = DRAWS, spikes: float = 0.0) -> list[str]:
    """One run against another, where runs are known not to differ by more than what they show themselves."""
    rng = random.Random(f"{noise} {slower} {spikes}")

    def change() -> Speed:
        before, now = run(rng, noise, spikes=spikes), run(rng, noise, spikes=spikes)
        return changes({"b": replace(before, spread=0.0)}, {"b": replace(now, log_ratio=now.log_ratio + slower)})["b"]

    return [judge_speed("b", change()).verdict for _ in range(draws)]


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.05])  # a pass: 1.1 % of a run at most
def test_no_change_passes_and_1_3_fails_on_a_quiet_machine(noise):
    assert verdicts(noise) == [PASS] * DRAWS
    assert verdicts(noise, SLOWER).count(REGRESSION) >= 0.99 * DRAWS


@pytest.mark.parametrize("noise", [0.08, 0.15, 0.3, 1.0])
def test_a_noisy_machine_makes_no_regression_and_hides_none_behind_a_pass(noise):
    assert verdicts(noise).count(REGRESSION) <= DRAWS // 1000
    assert verdicts(noise, SLOWER).count(PASS) <= DRAWS // 1000


def test_a_noise_of_30_percent_a_pass_is_inconclusive():
    assert verdicts(0.3).count(INCONCLUSIVE) >= 0.99 * DRAWS
    assert verdicts(0.3, SLOWER).count(INCONCLUSIVE) >= 0.99 * DRAWS


def test_noise_at_the_limit_on_both_sides_still_tells_1_3_from_no_change():
    """The strictest reading: the summaries themselves, not their passes, scatter by 2 %."""
    rng = random.Random(3)

    def verdict(slower: float) -> str:
        before, now = (Speed(rng.gauss(level, NOISE_LIMIT), NOISE_LIMIT, 200, 3, 0.0) for level in (0.0, slower))
        return judge_speed("b", changes({"b": before}, {"b": now})["b"]).verdict

    assert [verdict(0.0) for _ in range(DRAWS)].count(PASS) == DRAWS
    assert [verdict(SLOWER) for _ in range(DRAWS)].count(REGRESSION) == DRAWS


def test_one_round_in_twenty_that_takes_five_times_as_long_changes_nothing():
    assert verdicts(0.03, spikes=0.05).count(REGRESSION) == 0
    assert verdicts(0.03, SLOWER, spikes=0.05).count(PASS) == 0
    assert verdicts(0.03, SLOWER, spikes=0.05).count(REGRESSION) >= 0.98 * DRAWS


def test_a_huge_slow_down_fails_on_a_noisy_machine_too():
    assert verdicts(0.3, math.log(4.0)) == [REGRESSION] * DRAWS


def test_a_faster_benchmark_passes():
    assert verdicts(0.05, math.log(0.5), draws=100) == [PASS] * 100


def test_the_noise_of_a_run_is_the_standard_error_of_its_typical_ratio():
    rng = random.Random(1)
    runs = [run(rng, 0.05) for _ in range(DRAWS)]
    scatter = math.sqrt(sum((each.log_ratio - math.log(3.0)) ** 2 for each in runs) / DRAWS)
    claimed = math.sqrt(sum(each.noise**2 for each in runs) / DRAWS)
    assert claimed == pytest.approx(scatter, rel=0.1)


def test_the_typical_ratio_and_its_noise_agree_with_scipy():
    rng = random.Random(2)
    logs = [rng.gauss(0.5, 0.3) for _ in range(30)]
    got = speed([Pass([math.exp(value)] * 3, [1.0] * 3) for value in logs])
    assert got.log_ratio == pytest.approx(stats.trim_mean(logs, 0.2))
    assert got.noise == pytest.approx(stats.mstats.trimmed_stde(logs, limits=(0.2, 0.2)), rel=0.05)


def test_a_change_agrees_with_yuens_test_in_scipy():
    rng = random.Random(5)
    before, after = ([rng.gauss(level, 0.02) for _ in range(PASSES)] for level in (0.0, 0.05))
    change = changes(*({"b": speed([Pass([math.exp(x)], [1.0]) for x in side])} for side in (before, after)))["b"]
    yuen = stats.ttest_ind(after, before, equal_var=False, trim=0.2)
    assert change.log_ratio / change.noise == pytest.approx(yuen.statistic)
    assert change.freedom == math.floor(yuen.df)


def test_too_few_passes_are_refused():
    with pytest.raises(ValueError, match="9 passes are too few"):
        speed([Pass([1.0], [1.0])] * 9)


def test_one_run_a_side_is_inconclusive_whatever_it_shows():
    alone = Speed(0.0, 0.001, 11)
    for level in (0.0, 1.0):
        finding = judge_speed("b", changes({"b": alone}, {"b": replace(alone, log_ratio=level)})["b"])
        assert (finding.verdict, "give 4" in finding.text) == (INCONCLUSIVE, True)


def test_runs_that_jump_wildly_have_an_interval_too():
    change = Speed(0.0, 50.0, 1, 4, 100.0)
    assert judge_speed("b", change).verdict == INCONCLUSIVE


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
