"""The kit is worth something because it finds planted faults that a greedy run does not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from harness.conformance.promise import fare, promises
from harness.conformance.toy import ToyDecoder, geometry, greedy
from kernels.backend import resolve
from strategies.paged import Paged
from tests.conformance.mutants.table import MUTANTS, Mutant

PROMISES = {one.name: one for one in promises()}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.kind}-{mutant.name}")
def test_the_promise_that_a_fault_breaks_finds_it(mutant):
    outcome = fare(PROMISES[mutant.killer], mutant.subject())
    assert outcome.status == "failed", f"{mutant.name} {outcome.status}"
    assert outcome.why


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.kind}-{mutant.name}")
def test_the_same_cache_without_the_fault_keeps_that_promise(mutant):
    outcome = fare(PROMISES[mutant.killer], mutant.subject(faulty=False))
    assert outcome.status == "passed", outcome.why


def test_every_kind_of_fault_is_planted_at_least_four_times():
    count = Counter(mutant.kind for mutant in MUTANTS)
    assert set(count) == set("BPRQNXDCLA")
    assert min(count.values()) >= 4, count


def test_names_are_distinct():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_at_least_half_of_the_faults_survive_a_greedy_run_of_one_sequence():
    """12 prompt tokens and 12 greedy ones on a toy model with 9 query and 3 KV heads: the tokens are those without the fault."""
    survivors = [mutant.name for mutant in MUTANTS if _tokens(mutant, faulty=True) == _tokens(mutant, faulty=False)]
    assert survivors == [mutant.name for mutant in MUTANTS if mutant.survives_greedy]
    assert len(survivors) >= len(MUTANTS) / 2


def test_the_greedy_run_does_find_a_gross_fault():
    """Otherwise surviving it would mean nothing: values that read back as zero change the tokens."""
    zero = Mutant("zero values", "Q", (), "", _Zero, Paged)
    assert _tokens(zero, faulty=True) != _tokens(zero, faulty=False)


class _Zero(Paged):
    def attend(self, layer, q, k, v, plan):
        return super().attend(layer, q, k, torch.zeros_like(v), plan)


def _tokens(mutant: Mutant, faulty: bool) -> list[int]:
    shape = geometry((9, 3), 16, (None, None), "float32", 64)
    build = mutant.build if faulty else mutant.sound
    return greedy(ToyDecoder(shape), build(shape, None, resolve("reference"), **mutant.parameters), list(range(1, 13)), 12)
