"""Forks and guesses are ways to compute, not other answers."""

from __future__ import annotations

import pytest

from harness.engine.request import Request
from harness.measure.metrics import metrics

STORAGES = ["none", "contiguous", "paged"]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("step_tokens", [3, 2048])
def test_samples_of_one_prompt_equal_as_many_requests(toy, make_prompt, storage, step_tokens):
    together = [Request(0, make_prompt(0, 6), 7, temperature=1.0, samples=3, seed=5), Request(3, make_prompt(1, 9), 4)]
    apart = [Request(row, make_prompt(0, 6), 7, temperature=1.0, seed=5) for row in range(3)] + [Request(3, make_prompt(1, 9), 4)]
    answers = toy.answers(toy.cache(storage), together, step_tokens)
    assert answers == toy.answers(toy.cache("none"), apart)
    assert len({answers[0], answers[1], answers[2]}) == 3


def test_a_shared_prompt_is_fed_once(toy, make_prompt):
    log = toy.engine(toy.cache("paged", page_size=4)).run([Request(0, make_prompt(0, 6), 5, samples=3)])
    assert sum(step.prefill_tokens_fed for step in log.steps) == 6
    assert sum(step.decode_tokens_fed for step in log.steps) == 3 * 4


def test_forks_that_find_no_room_read_the_prompt_themselves(toy, make_prompt):
    request = Request(0, make_prompt(0, 6), 5, temperature=1.0, samples=3)
    cache = toy.cache("paged", page_size=4)
    engine = toy.engine(cache, max_sequences=1)
    engine.run([request])
    assert {id_: done.tokens for id_, done in engine.completions.items()} == toy.answers(toy.cache("none"), [request])
    assert cache.stats().in_use_bytes == 0


def test_a_fork_of_one_new_token_needs_no_second_step(toy, make_prompt):
    log = toy.engine(toy.cache("paged")).run([Request(0, make_prompt(0, 6), 1, temperature=1.0, samples=4)])
    assert (len(log.steps), len(log.tokens)) == (1, 4)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("step_tokens", [3, 2048])
def test_guessing_ahead_changes_nothing(toy, make_prompt, storage, temperature, step_tokens):
    repeating = make_prompt(3, 4) * 3
    plain = [Request(row, repeating[row:], 12, temperature=temperature) for row in range(3)]
    guessing = [Request(row, repeating[row:], 12, temperature=temperature, draft_tokens=row + 2) for row in range(3)]
    assert toy.answers(toy.cache(storage), guessing, step_tokens) == toy.answers(toy.cache("none"), plain)


def test_right_guesses_save_steps_and_all_tokens_are_counted(toy, make_prompt):
    """A decoder that always says the same token makes every guess of a repeated token right."""
    toy.decoder.head[:] = 0  # all logits equal: token 0 wins the tie
    log = toy.engine(toy.cache("paged")).run([Request(0, (0, 0, 0, 0), 9, draft_tokens=3)])
    assert [step.tokens_emitted for step in log.steps] == [1, 4, 4]
    assert [token.index for token in log.tokens] == list(range(9))
    assert metrics(log, 1, None, None)["tokens_emitted"] == 9
    assert sum(step.tokens_recomputed for step in log.steps) == 0


def test_rows_of_wrong_guesses_are_given_back(toy, make_prompt):
    cache = toy.cache("paged", page_size=1)
    log = toy.engine(cache).run([Request(0, make_prompt(0, 5), 6, temperature=3.0, draft_tokens=4)])
    assert sum(step.tokens_fed for step in log.steps) > 5 + 6 - 1  # some guesses were wrong
    assert sum(step.tokens_recomputed for step in log.steps) == 0  # another token in the same place is new work
    for step in log.steps[:-1]:
        emitted = sum(token.step <= step.step for token in log.tokens)
        assert step.kv_live_bytes == (5 + emitted - 1) * toy.row_bytes
    assert cache.stats().in_use_bytes == 0


def test_a_cache_that_cannot_rewind_far_enough_refuses_the_guesses_by_name(toy, make_prompt):
    engine = toy.engine(toy.cache("paged", window=8, slack=2))
    engine.run([Request(4, make_prompt(0, 5), 6, draft_tokens=3), Request(5, make_prompt(1, 5), 6, draft_tokens=2)])
    assert engine.completions[4].reason == "refused"
    assert engine.completions[4].detail == "request 4 can never run: it takes back up to 3 tokens a step and the cache can take back 2"
    assert engine.completions[5].reason == "length"
