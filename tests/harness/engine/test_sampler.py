"""Tokens are drawn with the right frequencies, and each draw depends on its own row and name alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from harness.engine.drafts import lookup
from harness.engine.sampler import Draw, Sampler


def greedy(position: int) -> Draw:
    return Draw(0.0, 1.0, 0, 0, position)


def test_greedy_takes_the_largest_and_the_first_on_a_tie():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    assert Sampler()(logits, [greedy(0), greedy(1)]) == [1, 0]


def test_no_rows_give_no_tokens():
    assert Sampler()(torch.empty(0, 5), []) == []


def test_rows_and_draws_must_agree():
    with pytest.raises(ValueError, match="2 rows of logits cannot serve 1 draws"):
        Sampler()(torch.zeros(2, 5), [greedy(0)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    logits = np.array([1.0, -0.5, 2.0, 0.0, 0.3])
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    n = 4000
    tokens = Sampler()(torch.tensor(logits).repeat(n, 1), [Draw(temperature, 1.0, 11, 0, position) for position in range(n)])
    counts = Counter(tokens)
    for token, share in enumerate(expected):
        assert abs(counts[token] / n - share) < 4.5 * (share * (1 - share) / n) ** 0.5


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log().repeat(2000, 1)
    kept = {}
    for top_p in (0.4, 0.6, 0.81, 1.0):
        kept[top_p] = set(Sampler()(logits, [Draw(1.0, top_p, 3, 0, position) for position in range(2000)]))
    assert kept == {0.4: {0}, 0.6: {0, 1}, 0.81: {0, 1, 2}, 1.0: {0, 1, 2, 3}}


def test_a_draw_does_not_depend_on_its_row_or_mates():
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50, generator=rng, dtype=torch.float64)
    draws = [Draw(1.0, 0.9, 4, row, 7) for row in range(6)]
    together = Sampler()(logits, draws)
    assert [Sampler()(logits[row : row + 1], [draws[row]])[0] for row in range(6)] == together
    assert Sampler()(logits.flip(0), draws[::-1]) == together[::-1]


def test_seed_request_and_position_each_change_the_draw():
    base = Draw(1.0, 1.0, 0, 0, 0)
    others = [Draw(1.0, 1.0, 1, 0, 0), Draw(1.0, 1.0, 0, 1, 0), Draw(1.0, 1.0, 0, 0, 1), Draw(1.0, 1.0, 10, 0, 0)]
    assert len({draw.uniform() for draw in (base, *others)}) == 5
    assert Draw(1.0, 1.0, 1, 11, 1).uniform() != Draw(1.0, 1.0, 11, 1, 1).uniform()
    assert base.uniform() == Draw(0.5, 0.1, 0, 0, 0).uniform()


def test_guesses_copy_what_followed_the_same_words():
    assert lookup([1, 2, 3, 4, 9, 1, 2, 3], 2) == [4, 9]
    assert lookup([5, 7, 6, 7, 8, 7], 1) == [8]


def test_guesses_without_an_earlier_occurrence_repeat_the_last_token():
    assert lookup([1, 2, 3], 3) == [3, 3, 3]
    assert lookup([4], 2) == [4, 4]
    assert lookup([1, 2, 1], 4) == [2, 1, 1, 1]
