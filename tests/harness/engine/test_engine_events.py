"""The events of a run under a clock that we move ourselves give the metrics that we can work out by hand."""

from __future__ import annotations

import pytest

from harness.engine.request import Request
from harness.measure.metrics import metrics


@pytest.fixture
def timed(toy):
    """Every fed token keeps the device busy for 10 ms; launching it takes no time."""
    inner = toy.decoder.__call__

    def decoder(ids, plan, cache, rows=None):
        toy.clock.launch(0.01 * len(ids))
        return inner(ids, plan, cache, rows)

    toy.decoder = decoder
    return toy


def test_times_follow_the_device_and_not_the_launch(timed, make_prompt):
    log = timed.engine(timed.cache("contiguous")).run([Request(0, make_prompt(0, 100), 21)])
    result = metrics(log, timed.row_bytes, None, None)
    assert result["ttft_s"]["mean"] == pytest.approx(1.0)
    assert result["itl_s"]["mean"] == pytest.approx(0.01)
    assert result["e2e_s"]["mean"] == pytest.approx(1.2)
    assert result["prefill_tok_per_s"] == pytest.approx(100)
    assert result["decode_tok_per_s"] == pytest.approx(100)
    assert result["tokens_fed"] == 120


def test_no_cache_pays_for_the_whole_sequence_at_each_token(timed, make_prompt):
    log = timed.engine(timed.cache("none")).run([Request(0, make_prompt(0, 100), 21)])
    result = metrics(log, 0, None, None)
    assert result["ttft_s"]["mean"] == pytest.approx(1.0)
    assert result["itl_s"]["mean"] == pytest.approx(sum(0.01 * n for n in range(101, 121)) / 20)
    assert result["tokens_fed"] == sum(range(100, 121))
    assert result["tokens_recomputed"] == sum(range(100, 120))
    assert result["kv_in_use_bytes_peak"] == 0


def test_time_in_the_queue_belongs_to_the_first_token(timed, make_prompt):
    log = timed.engine(timed.cache("paged"), max_sequences=1).run([Request(0, make_prompt(0, 50), 1), Request(1, make_prompt(1, 50), 1)])
    assert metrics(log, 1, None, None)["ttft_s"]["mean"] == pytest.approx((0.5 + 1.0) / 2)


def test_bytes_come_from_the_cache_while_the_sequences_live(toy, make_prompt):
    log = toy.engine(toy.cache("contiguous", slab="exact")).run([Request(row, make_prompt(row, 10), 3) for row in range(2)])
    result = metrics(log, toy.row_bytes, None, None)
    assert result["kv_reserved_bytes"] == 2 * 12 * toy.row_bytes
    assert result["kv_live_bytes_peak"] == 2 * 12 * toy.row_bytes
    assert [step.kv_live_bytes for step in log.steps] == [2 * n * toy.row_bytes for n in (10, 11, 12)]


def test_every_request_has_an_end_and_its_tokens_in_order(toy, make_prompt):
    engine = toy.engine(toy.cache("paged"), step_tokens=3)
    log = engine.run([Request(row, make_prompt(row, 5), 4) for row in range(3)])
    for id_, request in log.requests.items():
        tokens = [token for token in log.tokens if token.request_id == id_]
        assert request.reason == "length"
        assert [token.index for token in tokens] == [0, 1, 2, 3]
        assert [token.context for token in tokens] == [5, 6, 7, 8]
        assert tuple(token.token_id for token in tokens) == engine.completions[id_].tokens
        assert [token.phase for token in tokens] == ["prefill", "decode", "decode", "decode"]
