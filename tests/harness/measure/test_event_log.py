"""The event log refuses rows that contradict each other."""

from __future__ import annotations

import pytest

from harness.engine.events import DECODE, LENGTH, PREFILL, EventLog, StepEvent, TokenEvent


def a_step(number=0, emitted=1):
    return StepEvent(number, 0.0, 1.0, 1, 4, 0, 0, emitted, 0, 0, 0, 0)


def a_token(request=0, number=0):
    return TokenEvent(request, number, PREFILL, 0, 4, 1)


@pytest.fixture
def log():
    log = EventLog()
    log.arrived(0, 0.0, 4)
    return log


def test_a_step_must_have_as_many_rows_as_it_says(log):
    with pytest.raises(ValueError, match="emitted 2 tokens and has 1 rows"):
        log.stepped(a_step(emitted=2), [a_token()])
    assert log.steps == []


def test_a_request_that_is_over_emits_nothing(log):
    log.ended(0, LENGTH, 1.0)
    with pytest.raises(ValueError, match="already ended"):
        log.stepped(a_step(), [a_token()])


def test_a_request_that_never_arrived_emits_nothing(log):
    with pytest.raises(ValueError, match="never arrived"):
        log.stepped(a_step(), [a_token(request=9)])


def test_a_token_belongs_to_its_own_step(log):
    with pytest.raises(ValueError, match="token of step 3"):
        log.stepped(a_step(), [a_token(number=3)])


def test_an_id_arrives_and_ends_once(log):
    with pytest.raises(ValueError, match="already arrived"):
        log.arrived(0, 1.0, 4)
    log.ended(0, LENGTH, 1.0)
    with pytest.raises(ValueError, match="already ended"):
        log.ended(0, LENGTH, 1.0)


def test_an_unknown_reason_is_refused_by_name(log):
    with pytest.raises(ValueError, match="'bored'"):
        log.ended(0, "bored", 1.0)


def test_the_phase_follows_from_what_was_fed():
    fed = {(4, 0): PREFILL, (0, 4): DECODE, (2, 2): "mixed"}
    for (prefill, decode), phase in fed.items():
        step = StepEvent(0, 0.0, 1.0, 1, prefill, decode, 0, 0, 0, 0, 0, 0)
        assert (step.phase, step.tokens_fed) == (phase, 4)
