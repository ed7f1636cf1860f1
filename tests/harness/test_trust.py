"""The experiment about trust: it plants what it says, its bare loop does a run's work, and it says what is wrong."""

from __future__ import annotations

from harness.engine.request import Request
from harness.phases import Load, serve
from harness.schema import Measure
from harness.sides import Contender
from tests.benchmarks import toy, trust

LOAD = Load((Request(0, tuple(range(1, 20)), 5),), 2048, None)


def side() -> Contender:
    settings = toy.settings("paged")
    model = toy.model(settings.heads)
    return trust.twin_of(Contender(settings, model, model.decoder, toy.ops(), None))


def test_a_bare_loop_does_the_work_of_a_run():
    served, bare = side(), side()
    log = serve(served, served.cache(), LOAD, "cpu")
    assert trust.bare_s(bare, LOAD) > 0
    assert bare.ops.calls == served.ops.calls
    assert sum(bare.ops.calls.values()) > len(log.steps)


def test_a_slowed_decoder_takes_its_factor_of_time(monkeypatch):
    times = iter([0.0, 10.0, 10.5, 10.9, 11.0, 99.0])  # starts at 0, done at 10, then asked until 11 has come
    monkeypatch.setattr(trust, "now", lambda: next(times))
    assert trust.Slowed(lambda x: x + 1, 1.1)(1) == 2
    assert next(times) == 99.0


def test_every_comparison_is_counted_once():
    one = side()
    found = trust.verdicts(one, trust.twin_of(one), LOAD, 2, Measure(5, 0.0, 1, None), lambda done, total: None)
    assert {sum(counts.values()) for counts in found["verdicts"].values()} == {2}
    assert {len(ratios) for ratios in found["ratios"].values()} == {2}


def found(alarms: int, missed: int, low: float, verdict: str) -> dict:
    return {
        "same": {"times": 40, "verdicts": {"itl_s": {"indistinguishable": 40 - alarms, "faster": alarms}}},
        "slower": {"times": 10, "verdicts": {"itl_s": {"slower": 10 - missed, "indistinguishable": missed}}},
        "overhead": {"ratio": low + 0.01, "low": low, "high": low + 0.02, "noise_floor": 0.01, "verdict": verdict},
    }


def test_what_should_not_be_is_said():
    assert trust.told(found(5, 0, 1.01, "slower")) == []
    assert trust.told(found(6, 0, 1.01, "slower")) == ["itl_s: 6 false alarms"]
    assert trust.told(found(0, 1, 1.01, "slower")) == ["itl_s: 1 missed"]
    assert trust.told(found(0, 0, 1.03, "slower")) == ["measuring costs more than 2 %"]
    assert trust.told(found(0, 0, 1.03, "indistinguishable")) == []
