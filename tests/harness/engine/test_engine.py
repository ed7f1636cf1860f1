"""The engine gives the same answers whatever the cache, the chunks, the mates or the accidents."""

from __future__ import annotations

import pytest

from harness.engine import events
from harness.engine.request import Request

CACHES = [
    ("none", {}),
    ("contiguous", {"slab": "max"}),
    ("contiguous", {"slab": "pow2"}),
    ("contiguous", {"slab": "exact"}),
    ("contiguous", {"slab": "growth"}),
    ("paged", {"page_size": 1}),
    ("paged", {"page_size": 16}),
]
ids = [f"{name}-{'-'.join(str(v) for v in params.values())}" for name, params in CACHES]
every_cache = pytest.mark.parametrize(("storage", "params"), CACHES, ids=ids)


@pytest.fixture
def requests(make_prompt):
    return [Request(row, make_prompt(row, length), 6) for row, length in enumerate((5, 1, 13, 8))]


@pytest.fixture
def alone(toy, requests):
    """Each request by itself, with no cache at all: nothing can leak and nothing can be stored wrongly."""
    answers = {}
    for request in requests:
        answers |= toy.answers(toy.cache("none"), [request])
    return answers


@every_cache
@pytest.mark.parametrize("step_tokens", [1, 4, 2048])
def test_cache_chunks_and_mates_do_not_change_an_answer(toy, requests, alone, storage, params, step_tokens):
    assert toy.answers(toy.cache(storage, **params), requests, step_tokens) == alone


def test_answers_depend_on_the_whole_prompt(toy, make_prompt):
    changed = (60, *make_prompt(2, 13)[1:])
    answers = toy.answers(toy.cache("contiguous"), [Request(0, make_prompt(2, 13), 6), Request(1, changed, 6)])
    assert answers[0] != answers[1]


def test_order_of_arrival_does_not_change_an_answer(toy, requests, alone):
    assert toy.answers(toy.cache("paged"), requests[::-1], step_tokens=4) == alone


def test_a_second_run_on_the_same_engine_is_like_the_first(toy, requests, alone):
    engine = toy.engine(toy.cache("paged", page_size=4))
    for order in (requests, requests[::-1]):
        engine.run(order)
        assert {id_: done.tokens for id_, done in engine.completions.items()} == alone


def test_tokens_fed_and_recomputed_are_counted_by_position(toy, make_prompt):
    prompt_tokens, new_tokens = 9, 5
    request = Request(0, make_prompt(0, prompt_tokens), new_tokens)
    stored = toy.engine(toy.cache("contiguous")).run([request])
    recomputed = toy.engine(toy.cache("none")).run([request])
    assert sum(step.tokens_fed for step in stored.steps) == prompt_tokens + new_tokens - 1
    assert sum(step.tokens_recomputed for step in stored.steps) == 0
    assert [step.tokens_fed for step in recomputed.steps] == [9, 10, 11, 12, 13]
    assert sum(step.tokens_recomputed for step in recomputed.steps) == 9 + 10 + 11 + 12


def test_a_cache_that_keeps_nothing_is_never_fed_half_a_prompt(toy, make_prompt):
    log = toy.engine(toy.cache("none"), step_tokens=4).run([Request(row, make_prompt(row, 10), 2) for row in range(2)])
    assert [step.tokens_fed for step in log.steps] == [10, 11, 10, 11]
    assert [step.tokens_emitted for step in log.steps] == [1, 1, 1, 1]


def test_a_chunked_prompt_emits_once_and_feeds_each_token_once(toy, make_prompt):
    log = toy.engine(toy.cache("paged"), step_tokens=4).run([Request(0, make_prompt(0, 10), 2)])
    assert [step.tokens_fed for step in log.steps] == [4, 4, 2, 1]
    assert [step.tokens_emitted for step in log.steps] == [0, 0, 1, 1]
    assert [step.phase for step in log.steps] == ["prefill", "prefill", "prefill", "decode"]


def test_decoding_sequences_go_before_a_long_prompt(toy, make_prompt):
    engine = toy.engine(toy.cache("paged"), step_tokens=4)
    engine.submit(Request(0, make_prompt(0, 3), 8), 0.0)
    engine.step()
    engine.submit(Request(1, make_prompt(1, 30), 1), 0.0)
    engine.step()
    assert (engine.log.steps[-1].decode_tokens_fed, engine.log.steps[-1].prefill_tokens_fed) == (1, 3)


def test_an_end_token_ends_a_request_unless_it_is_ignored(toy, make_prompt):
    produced = toy.answers(toy.cache("paged"), [Request(0, make_prompt(0, 5), 8)])[0]
    end = produced[3]
    cut = produced.index(end) + 1
    engine = toy.engine(toy.cache("paged"), eos_ids=(end,))
    engine.run([Request(0, make_prompt(0, 5), 8, ignore_eos=False), Request(1, make_prompt(0, 5), 8, ignore_eos=True)])
    assert (engine.completions[0].tokens, engine.completions[0].reason) == (produced[:cut], events.STOP)
    assert (engine.completions[1].tokens, engine.completions[1].reason) == (produced, events.LENGTH)


def test_no_more_than_max_sequences_run_at_once(toy, requests, alone):
    engine = toy.engine(toy.cache("paged"), max_sequences=2)
    log = engine.run(requests)
    assert max(step.batch_size for step in log.steps) == 2
    assert {id_: done.tokens for id_, done in engine.completions.items()} == alone


def test_idle_time_before_an_arrival_is_skipped_and_counted(toy, make_prompt):
    log = toy.engine(toy.cache("paged")).run([Request(0, make_prompt(0, 3), 2, arrival_s=50.0), Request(1, make_prompt(1, 3), 2)])
    assert toy.clock.now() == 0.0
    assert [step.start_s for step in log.steps] == [0.0, 0.0, 50.0, 50.0]
    assert log.requests[0].arrival_s == 50.0


def test_an_id_serves_one_sequence_a_run(toy, make_prompt):
    with pytest.raises(ValueError, match="request 1 would take the id 1, which is in use"):
        toy.engine(toy.cache("paged")).run([Request(0, make_prompt(0, 3), 2, samples=2), Request(1, make_prompt(1, 3), 2)])


def test_a_new_run_waits_for_the_old_requests(toy, requests):
    engine = toy.engine(toy.cache("paged"))
    engine.submit(requests[0], 0.0)
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.run(requests)
