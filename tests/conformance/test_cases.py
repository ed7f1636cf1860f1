"""Every public case has a test in the kit or an owner elsewhere, and every promise says what it answers for."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.conformance.cases import CASES, answered_by
from harness.conformance.promise import KINDS, promises


def test_all_cases_are_listed():
    assert Counter(case[0] for case in CASES) == Counter(B=7, P=6, L=9, R=6, Q=9, A=6, N=5, X=5, D=5, C=5, G=8, M=11, T=5)
    assert len(CASES) == 87


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_answered_by_a_promise_or_has_an_owner(case):
    assert answered_by(case) or CASES[case].owner, f"nobody answers for {case}: {CASES[case].what}"


def test_every_case_of_the_kinds_of_the_kit_is_tested_here_but_two():
    """A09 needs preemption, which is the scheduler's, and Q12 asks for the right measure of quality."""
    assert {case for case in CASES if case[0] in KINDS and not answered_by(case)} == {"A09", "Q12"}


def test_promises_name_only_cases_that_there_are():
    named = {case for one in promises() for case in one.cases}
    assert named <= set(CASES), named - set(CASES)


def test_every_promise_is_described_and_filed():
    for one in promises():
        assert one.kind in KINDS
        assert one.cases, one.name
        assert one.check.__doc__, one.name


def test_sources_are_public_threads():
    assert all("/" in case.source and "#" in case.source for case in CASES.values())
