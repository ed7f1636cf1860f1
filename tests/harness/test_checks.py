"""The checks that every configuration passes: one sentence for each fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from harness.checks import at_least, coerced, typed
from harness.errors import UserError


@dataclass(frozen=True)
class Inner:
    count: int
    init: str = "mean"


@dataclass(frozen=True)
class Outer:
    rows: int
    rate: float
    mode: Literal["fast", "safe"] = "safe"
    inner: Inner | None = None
    limit: int | None = None


def test_values_of_the_right_types_become_the_dataclass():
    assert typed(Outer, {"rows": 2, "rate": 1, "inner": {"count": 3}, "limit": None}, "x") == Outer(2, 1.0, "safe", Inner(3), None)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rows": 1, "rate": 1.0, "rowz": 2}, "unknown key x.rowz: x takes rows, rate, mode, inner, limit; did you mean x.rows?"),
        ({"rate": 1.0}, "x.rows is missing: give it a whole number"),
        ({"rows": "???", "rate": 1.0}, "x.rows is missing: set x.rows=VALUE to a whole number"),
        ({"rows": True, "rate": 1.0}, "x.rows=True is true or false: use a whole number"),
        ({"rows": 1.5, "rate": 1.0}, "x.rows=1.5 is a number: use a whole number"),
        ({"rows": "two", "rate": 1.0}, "x.rows='two' is text: use a whole number"),
        ({"rows": None, "rate": 1.0}, "x.rows is null: use a whole number"),
        ({"rows": [1], "rate": 1.0}, r"x.rows=\[1\] is a list: use a whole number"),
        ({"rows": 1, "rate": 1.0, "mode": "fst"}, "x.mode='fst' is text: use one of fast, safe"),
        ({"rows": 1, "rate": 1.0, "limit": "no"}, "x.limit='no' is text: use a whole number or null"),
        ({"rows": 1, "rate": 1.0, "inner": {"cout": 1}}, "unknown key x.inner.cout: x.inner takes count, init"),
        ({"rows": 1, "rate": 1.0, "inner": 3}, "x.inner=3 is a whole number: use keys count, init or null"),
    ],
)
def test_each_fault_is_one_sentence_that_says_what_is_allowed(given, sentence):
    with pytest.raises(UserError, match=f"^{sentence}"):
        typed(Outer, given, "x")


def test_a_literal_does_not_take_a_value_that_only_compares_equal():
    with pytest.raises(UserError):
        coerced("k", True, Literal[1, 2])


def test_lists_become_what_the_hint_says():
    assert coerced("k", [1, 2], tuple[int, ...]) == (1, 2)
    with pytest.raises(UserError, match=r"k\[1\]='b' is text"):
        coerced("k", [1, "b"], list[int])


def test_not_a_number_is_not_at_least_anything():
    with pytest.raises(UserError):
        at_least("k", float("nan"), 0)
