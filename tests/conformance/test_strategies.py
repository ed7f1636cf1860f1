"""Every strategy in conf/strategy keeps every promise of the kit, on the kernels that a CPU runs and on the plain ones."""

from __future__ import annotations

import pytest

from harness.catalogue import strategy_names
from harness.conformance.doors import open_door
from harness.conformance.promise import fare, promises

PROMISES = promises()
ON_REFERENCE = ("contiguous", "kivi4", "paged_prefix", "window_q4")  # one of each storage, mask and codec kind


@pytest.mark.parametrize("one", PROMISES, ids=lambda one: f"{one.kind}-{one.name}")
@pytest.mark.parametrize("strategy", strategy_names())
def test_strategy_keeps_its_promise(strategy, one):
    _check(open_door(strategy, "cpu", 0, 30), one)


@pytest.mark.parametrize("one", PROMISES, ids=lambda one: f"{one.kind}-{one.name}")
@pytest.mark.parametrize("strategy", ON_REFERENCE)
def test_strategy_keeps_its_promise_on_the_reference_kernels(strategy, one):
    _check(open_door(strategy, "reference", 1, 10), one)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", strategy_names())
@pytest.mark.parametrize("one", [one for one in PROMISES if one.name.startswith("any_life")], ids=lambda one: one.name)
def test_strategy_survives_three_hundred_lives(strategy, one):
    _check(open_door(strategy, "cpu", 2, 300), one)


@pytest.mark.parametrize("kind", sorted({one.kind for one in PROMISES}))
def test_no_kind_is_empty_for_a_paged_cache_with_window_and_codec(kind):
    subject = open_door("window_q4", "cpu", 0, 3)
    assert any(fare(one, subject).status == "passed" for one in PROMISES if one.kind == kind)


def _check(subject, one):
    outcome = fare(one, subject)
    if outcome.status == "not applicable":
        pytest.skip(outcome.why)
    assert outcome.status == "passed", outcome.why
