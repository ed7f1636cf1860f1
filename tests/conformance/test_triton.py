"""The kit on the Triton kernels, in Triton's interpreter: the storages, masks and codecs that the kernels serve.

Five random lives of each kind. What a codec does not change (who owns which row) runs for the quantised ones under `-m soak` only.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.conformance.doors import open_door
from harness.conformance.promise import fare, promises
from tests.interpreter import functions_patched_once, integers_unchecked, numpy_warnings_as_errors

STRATEGIES = ("contiguous", "paged", "window", "int8", "q4_0")
QUANTISED = ("int8", "q4_0")
HOST_ONLY = "ALRC"  # kinds whose promises are about integers on the host


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    with functions_patched_once(), integers_unchecked(), numpy_warnings_as_errors():
        yield


def case(strategy, one):
    later = strategy in QUANTISED and one.kind in HOST_ONLY and not one.name.startswith("any_life")
    return pytest.param(strategy, one, marks=[pytest.mark.soak] if later else [], id=f"{strategy}-{one.kind}-{one.name}")


@pytest.mark.parametrize(("strategy", "one"), [case(strategy, one) for strategy in STRATEGIES for one in promises()])
def test_strategy_keeps_its_promise_on_the_triton_kernels(strategy, one):
    outcome = fare(one, open_door(strategy, "triton", 3, 5))
    if outcome.status == "not applicable":
        pytest.skip(outcome.why)
    assert outcome.status == "passed", outcome.why
