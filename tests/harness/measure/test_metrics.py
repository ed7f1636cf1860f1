"""Metrics recomputed by hand from small event logs."""

from __future__ import annotations

import json
import math
import random

import pytest

from harness.engine.events import CAPACITY, DECODE, LENGTH, MIXED, PREFILL, EventLog, StepEvent, TokenEvent
from harness.measure import metrics as m


def step(log, start_s, end_s, emitted=(), prefill=0, decode=0, recomputed=0, kv=(0, 0, 0, 0)):
    """Add one step; `emitted` is [(request, phase, index), ...]."""
    number = len(log.steps)
    tokens = [TokenEvent(request, number, phase, index, 10 + index, 7) for request, phase, index in emitted]
    batch = len({request for request, _, _ in emitted})
    log.stepped(StepEvent(number, start_s, end_s, batch, prefill, decode, recomputed, len(tokens), *kv), tokens)


def log_with(*requests):
    log = EventLog()
    for request in requests:
        log.arrived(request, 0.0, 8)
    return log


def test_the_first_token_belongs_to_prefill_and_the_rest_to_decode():
    log = log_with(0)
    step(log, 0.0, 1.0, [(0, PREFILL, 0)], prefill=50)
    for i in range(99):
        step(log, 1 + i * 4 / 99, 1 + (i + 1) * 4 / 99, [(0, DECODE, 1 + i)], decode=1)
    log.ended(0, LENGTH, 5.0)
    assert m.decode_tok_per_s(log) == pytest.approx(24.75)
    assert m.prefill_tok_per_s(log) == pytest.approx(50.0)
    assert m.ttft_s(log) == [1.0]
    assert m.e2e_s(log) == [5.0]
    assert m.summary(m.itl_s(log))["mean"] == pytest.approx(4 / 99)
    assert m.output_tok_per_s(log) == pytest.approx(20.0)


def test_the_decode_rate_does_not_depend_on_the_prompt():
    rates = set()
    for prefill_s in (0.5, 8.0):
        log = log_with(0)
        step(log, 0.0, prefill_s, [(0, PREFILL, 0)], prefill=10)
        step(log, prefill_s, prefill_s + 2.0, [(0, DECODE, 1)], decode=1)
        rates.add(m.decode_tok_per_s(log))
    assert rates == {0.5}


def test_finished_rows_add_nothing_and_tokens_are_not_steps():
    log = log_with(0, 1, 2)
    lengths = {0: 2, 1: 5, 2: 9}
    for i in range(9):
        alive = [request for request, length in lengths.items() if i < length]
        step(log, i * 0.5, (i + 1) * 0.5, [(request, PREFILL if i == 0 else DECODE, i) for request in alive], decode=len(alive))
        for request in alive:
            if i + 1 == lengths[request]:
                log.ended(request, LENGTH, (i + 1) * 0.5)
    assert len(log.tokens) == 16
    assert m.output_tok_per_s(log) == pytest.approx(16 / 4.5)
    assert sorted(m.e2e_s(log)) == [1.0, 2.5, 4.5]


def test_a_step_that_emits_three_tokens_counts_three():
    log = log_with(0)
    step(log, 0.0, 1.0, [(0, PREFILL, 0)], prefill=4)
    step(log, 1.0, 1.6, [(0, DECODE, i) for i in (1, 2, 3)], decode=4)
    assert m.decode_tok_per_s(log) == pytest.approx(5.0)
    assert m.itl_s(log) == pytest.approx([0.2, 0.2, 0.2])


@pytest.mark.parametrize("grouping", [(1,) * 12, (3, 3, 3, 3), (5, 1, 6)])
def test_mean_latency_between_tokens_does_not_depend_on_grouping(grouping):
    log = log_with(0)
    step(log, 0.0, 1.0, [(0, PREFILL, 0)], prefill=4)
    index, at_s = 1, 1.0
    for size in grouping:
        step(log, at_s, at_s + size * 0.1, [(0, DECODE, index + i) for i in range(size)], decode=size)
        index, at_s = index + size, at_s + size * 0.1
    assert m.summary(m.itl_s(log))["mean"] == pytest.approx(0.1)
    assert m.summary(m.itl_s(log))["n"] == 12


def test_phase_times_never_exceed_the_wall_and_a_mixed_step_is_shared_by_tokens_fed():
    log = log_with(0, 1)
    step(log, 0.0, 1.0, [(0, PREFILL, 0)], prefill=8)
    step(log, 1.0, 2.0, [(0, DECODE, 1), (1, PREFILL, 0)], prefill=9, decode=1)
    assert [s.phase for s in log.steps] == [PREFILL, MIXED]
    assert m.prefill_s(log) == pytest.approx(1.9)
    assert m.decode_s(log) == pytest.approx(0.1)
    assert m.prefill_s(log) + m.decode_s(log) <= m.wall_s(log) + 1e-12


def test_time_to_first_token_includes_the_wait():
    log = EventLog()
    log.arrived(4, 2.0, 8)
    step(log, 3.0, 3.5, [(4, PREFILL, 0)], prefill=8)
    assert m.ttft_s(log) == [1.5]


def test_a_request_cut_off_has_no_end_to_end_latency():
    log = log_with(0)
    step(log, 0.0, 1.0, [(0, PREFILL, 0)], prefill=4)
    log.ended(0, CAPACITY, 1.0)
    assert m.e2e_s(log) == []
    assert m.metrics(log, 1, None, None)["e2e_s"] == {"mean": None, "p50": None, "p90": None, "p99": None, "n": 0}


def test_bytes_are_peaks_and_waste_is_averaged_over_steps():
    log = log_with(0)
    step(log, 0.0, 1.0, [(0, PREFILL, 0)], prefill=4, kv=(100, 40, 30, 0))
    step(log, 1.0, 9.0, [(0, DECODE, 1)], decode=1, recomputed=3, kv=(100, 60, 60, 5))
    found = m.metrics(log, kv_bytes_per_token=10, device_peak_bytes=None, host_peak_rss_bytes=77)
    assert found["kv_reserved_bytes"] == 100
    assert found["kv_in_use_bytes_peak"] == 60
    assert found["kv_live_bytes_peak"] == 60
    assert found["kv_waste_ratio"] == pytest.approx(0.1)
    assert (found["tokens_fed"], found["tokens_recomputed"], found["tokens_emitted"]) == (5, 3, 2)
    assert (found["kv_bytes_per_token"], found["device_peak_bytes"], found["host_peak_rss_bytes"]) == (10, None, 77)


def test_waste_is_none_where_nothing_is_in_use():
    log = log_with(0)
    step(log, 0.0, 1.0, [(0, PREFILL, 0)], prefill=4)
    assert m.kv_waste_ratio(log) is None


def test_an_empty_log_has_no_rates():
    found = m.metrics(EventLog(), 1, None, None)
    assert found["decode_tok_per_s"] is None
    assert found["prefill_tok_per_s"] is None
    assert found["wall_s"] == 0.0


def test_every_metric_can_be_recomputed_from_the_rows():
    log = log_with(0, 1)
    step(log, 0.0, 1.0, [(0, PREFILL, 0), (1, PREFILL, 0)], prefill=16)
    step(log, 1.0, 1.5, [(0, DECODE, 1), (1, DECODE, 1)], decode=2)
    step(log, 1.5, 2.5, [(0, DECODE, 2)], decode=1)
    rows = [json.loads(json.dumps(row)) for row in log.rows()]
    tokens = [row for row in rows if row["row"] == "token"]
    steps = [row for row in rows if row["row"] == "step"]
    arrivals = {row["request_id"]: row["arrival_s"] for row in rows if row["row"] == "request"}
    assert sorted(m.ttft_s(log)) == sorted(t["end_s"] - arrivals[t["request_id"]] for t in tokens if t["index"] == 0)
    spent = sum(s["end_s"] - s["start_s"] for s in steps if s["phase"] == "decode")
    assert m.decode_tok_per_s(log) == pytest.approx(sum(t["phase"] == "decode" for t in tokens) / spent)
    assert m.metrics(log, 1, None, None)["tokens_fed"] == sum(s["tokens_fed"] for s in steps)


def test_a_slower_decode_moves_decode_metrics_and_no_other():
    def run(extra_s):
        log, at_s = log_with(0), 1.0
        step(log, 0.0, 1.0, [(0, PREFILL, 0)], prefill=8)
        for i in range(10):
            step(log, at_s, at_s + 0.01 + extra_s, [(0, DECODE, 1 + i)], decode=1)
            at_s += 0.01 + extra_s
        log.ended(0, LENGTH, at_s)
        return m.metrics(log, 1, None, None)

    plain, slowed = run(0.0), run(0.02)
    moved = {name for name in plain if plain[name] != slowed[name]}
    assert moved == {"itl_s", "e2e_s", "decode_tok_per_s", "output_tok_per_s", "wall_s"}
    assert slowed["itl_s"]["p50"] - plain["itl_s"]["p50"] == pytest.approx(0.02)


def test_latency_is_paired_with_the_context_it_was_paid_at():
    log = log_with(0)
    step(log, 0.0, 1.0, [(0, PREFILL, 0)], prefill=8)
    step(log, 1.0, 1.25, [(0, DECODE, 1)], decode=1)
    assert m.itl_by_context(log) == [(11, 0.25)]


def test_quantiles_agree_with_numpy():
    numpy = pytest.importorskip("numpy")
    rng = random.Random(3)
    for size in (1, 2, 7, 100):
        values = [rng.random() for _ in range(size)]
        for share in (0.0, 0.5, 0.9, 0.99, 1.0):
            assert m.quantile(values, share) == pytest.approx(float(numpy.quantile(values, share)))


def test_perplexity_is_one_mean_over_all_tokens():
    windows = [[2.0] * 7 + [5.0], [1.0, 1.0]]
    total = sum(map(sum, windows))
    assert m.perplexity_per_token(total, 10) == pytest.approx(8.1662, abs=1e-4)
    mean_of_means = math.exp(sum(sum(w) / len(w) for w in windows) / 2)
    assert mean_of_means == pytest.approx(5.4059, abs=1e-4)  # the mistake that the total avoids


def test_each_denominator_has_its_own_name():
    assert m.perplexity_per_token(30.0, 10) == pytest.approx(20.0855, abs=1e-4)
    assert m.perplexity_per_word(30.0, 6) == pytest.approx(148.413, abs=1e-3)
    assert m.bits_per_byte(30.0, 40) == pytest.approx(1.0820, abs=1e-4)


def test_a_ruined_model_has_infinite_perplexity_and_no_tokens_is_an_error():
    assert m.perplexity_per_token(1e6, 1) == math.inf
    with pytest.raises(ValueError, match="no scored tokens"):
        m.perplexity_per_token(1.0, 0)
