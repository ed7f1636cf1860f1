"""Too little memory, changed minds and hopeless requests: everyone ends, nobody else notices, nothing leaks."""

from __future__ import annotations

import pytest

from harness.engine.request import Request

PAGE = 4


def pages(toy, usable: int, page_size: int = PAGE) -> dict[str, int]:
    """Paged with this many pages to use, beside the scratch page."""
    return {"budget_bytes": (usable + 1) * page_size * toy.row_bytes, "page_size": page_size}


def reasons(engine) -> dict[int, str]:
    return {id_: done.reason for id_, done in engine.completions.items()}


def test_preemption_changes_neither_tokens_nor_reasons(toy, make_prompt):
    requests = [Request(row, make_prompt(row, 6), 10) for row in range(3)]
    big = toy.engine(toy.cache("paged", page_size=PAGE))
    big.run(requests)
    cache = toy.cache("paged", **pages(toy, 6))
    small = toy.engine(cache)
    log = small.run(requests)
    assert small.preemptions > 0
    assert big.preemptions == 0
    assert small.completions == big.completions
    assert sum(step.tokens_recomputed for step in log.steps) > 0
    assert sum(step.decode_tokens_fed for step in log.steps) == sum(token.phase == "decode" for token in log.tokens)
    assert cache.stats().in_use_bytes == 0


@pytest.mark.parametrize("step_tokens", [1, 3, 2048])
@pytest.mark.parametrize("usable", [4, 5, 7, 9])
@pytest.mark.parametrize("extra", [{}, {"temperature": 1.0}, {"temperature": 1.0, "samples": 2}, {"draft_tokens": 3}])
def test_any_pool_that_holds_the_longest_sequence_gives_the_same_answers(toy, make_prompt, usable, step_tokens, extra):
    requests = [Request(2 * row, make_prompt(row, 3 + 2 * row), 8, **extra) for row in range(3)]
    engine = toy.engine(toy.cache("paged", **pages(toy, usable)), step_tokens)
    log = engine.run(requests)
    assert {id_: done.tokens for id_, done in engine.completions.items()} == toy.answers(toy.cache("none"), requests)
    fed_first_time = sum(step.tokens_fed - step.tokens_recomputed for step in log.steps)
    needed = sum(len(request.prompt) + request.samples * (request.max_new_tokens - 1) for request in requests)
    assert fed_first_time >= needed if "draft_tokens" in extra else fed_first_time == needed  # wrong guesses come on top


@pytest.mark.parametrize("slab", ["max", "pow2", "exact", "growth"])
def test_contiguous_runs_take_turns_in_a_small_budget(toy, make_prompt, slab):
    requests = [Request(row, make_prompt(row, 6), 10) for row in range(4)]
    budget = (128 if slab == "max" else 36) * toy.row_bytes
    engine = toy.engine(toy.cache("contiguous", budget, slab=slab))
    engine.run(requests)
    assert {id_: done.tokens for id_, done in engine.completions.items()} == toy.answers(toy.cache("none"), requests)


def test_waiting_for_room_is_not_a_preemption(toy, make_prompt):
    engine = toy.engine(toy.cache("contiguous", 128 * toy.row_bytes, slab="max"))
    engine.run([Request(row, make_prompt(row, 6), 10) for row in range(3)])
    assert engine.preemptions == 0


def test_a_prompt_that_can_never_fit_is_refused_and_the_others_finish(toy, make_prompt):
    """Five pages of 16, one of them reserved: 64 rows fit, 65 never will."""
    cache = toy.cache("paged", **pages(toy, 4, page_size=16))
    engine = toy.engine(cache)
    log = engine.run(
        [
            Request(0, make_prompt(0, 64), 1),
            Request(1, make_prompt(1, 64), 2),
            Request(2, make_prompt(2, 65), 1),
            Request(3, make_prompt(3, 20), 3),
        ]
    )
    assert reasons(engine) == {0: "length", 1: "refused", 2: "refused", 3: "length"}
    needed, budget = 6 * 16 * toy.row_bytes, 5 * 16 * toy.row_bytes
    assert (
        engine.completions[2].detail
        == f"request 2 can never run: it needs {needed} bytes of KV for 65 tokens and the budget is {budget} bytes"
    )
    assert len(log.steps) <= 1 + 3 + 3
    assert cache.stats().in_use_bytes == 0


def test_three_of_four_fit_and_the_fourth_follows(toy, make_prompt):
    """A pool of 64 rows in pages of 4: four sequences of 20 cannot run at once, three can."""
    engine = toy.engine(toy.cache("paged", **pages(toy, 16)))
    log = engine.run([Request(row, make_prompt(row, 17), 4) for row in range(4)])
    assert set(reasons(engine).values()) == {"length"}
    assert max(step.batch_size for step in log.steps) == 3
    assert engine.preemptions == 0


def test_a_sequence_alone_in_a_full_cache_ends_for_capacity_with_what_it_has(toy, make_prompt):
    """A scheduler that believes rows cost nothing lets everything in; the cache still has the last word."""
    cache = toy.cache("paged", **pages(toy, 3))
    engine = toy.engine(cache)
    full = toy.answers(toy.cache("none"), [Request(0, make_prompt(0, 6), 10)])[0]
    engine._scheduler.budget_bytes = None
    engine.run([Request(0, make_prompt(0, 6), 10), Request(1, make_prompt(1, 4), 3)])
    assert reasons(engine) == {0: "capacity", 1: "length"}
    assert engine.completions[0].tokens == full[:7]  # 12 rows: the prompt and 6 of them, the 7th is not stored
    assert engine.completions[0].detail.startswith("request 0 ran alone and did not fit: the KV budget is ")
    assert cache.stats().in_use_bytes == 0


POINTS = ["queued", "between chunks", "mid-decode", "after the end"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("twice", [False, True])
def test_cancelling_at_any_point_frees_everything_and_disturbs_nobody(toy, make_prompt, point, twice):
    cache = toy.cache("paged", **pages(toy, 20))
    engine = toy.engine(cache, step_tokens=4)
    others = [Request(row, make_prompt(row, 5), 6) for row in (1, 2)]
    for request in (Request(0, make_prompt(0, 9), 6), *others):
        engine.submit(request, 0.0)
    for _ in range({"queued": 0, "between chunks": 1, "mid-decode": 5, "after the end": 40}[point]):
        engine.step()
    for _ in range(1 + twice):
        engine.cancel(0)
    while engine.step():
        pass
    assert engine.completions[0].reason == ("length" if point == "after the end" else "cancelled")
    assert {id_: engine.completions[id_].tokens for id_ in (1, 2)} == toy.answers(toy.cache("none"), others)
    assert cache.stats().in_use_bytes == 0


def test_cancelling_during_a_step_counts_from_its_end(toy, make_prompt):
    cache = toy.cache("paged", page_size=PAGE)
    engine = toy.engine(cache)
    engine.submit(Request(0, make_prompt(0, 9), 6), 0.0)
    toy.decoder.before_layer = lambda layer: engine.cancel(0)
    engine.step()
    assert engine.completions[0].reason == "cancelled"
    assert not engine.busy
    assert cache.stats().in_use_bytes == 0


def test_cancelling_a_parent_before_its_forks_split_off_leaves_the_forks(toy, make_prompt):
    request = Request(0, make_prompt(0, 9), 4, temperature=1.0, samples=3)
    engine = toy.engine(toy.cache("paged", page_size=PAGE), step_tokens=4)
    engine.submit(request, 0.0)
    engine.step()
    engine.cancel(0)
    engine.cancel(2)
    while engine.step():
        pass
    assert reasons(engine) == {0: "cancelled", 1: "length", 2: "cancelled"}
    assert engine.completions[1].tokens == toy.answers(toy.cache("none"), [request])[1]


def test_the_freed_pages_can_really_be_used_again(toy, make_prompt):
    cache = toy.cache("paged", **pages(toy, 4))
    engine = toy.engine(cache)
    for round_ in range(5):
        engine.submit(Request(round_, make_prompt(round_, 16), 1), 0.0)
        if round_ % 2:
            engine.cancel(round_)
        while engine.step():
            pass
    assert [engine.completions[round_].reason for round_ in range(5)] == ["length", "cancelled", "length", "cancelled", "length"]
