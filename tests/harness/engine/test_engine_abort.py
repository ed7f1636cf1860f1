"""Whatever is raised, wherever it is raised: the same step again is a clean run."""

from __future__ import annotations

import pytest

from harness.engine.request import Request

STORAGES = [("none", {}), ("contiguous", {"slab": "growth"}), ("paged", {"page_size": 4})]


class Planted(Exception):
    """Raised on purpose."""


@pytest.fixture
def requests(make_prompt):
    return [
        Request(0, make_prompt(0, 9), 5),
        Request(1, make_prompt(1, 4), 7, temperature=1.0, samples=2),
        Request(3, make_prompt(2, 6) * 2, 6, draft_tokens=2),
    ]


def drain(engine, requests, kinds) -> int:
    """Run to the end, calling `step` again after each planted exception -> how many there were."""
    for request in requests:
        engine.submit(request, 0.0)
    raised = 0
    while engine.busy:
        try:
            engine.step()
        except kinds:
            raised += 1
    return raised


def once_per_step(toy, layer: int, kind: type[BaseException]):
    """Raise before `layer`, the first time that each step gets there."""
    state = {"again": False}

    def before(at: int) -> None:
        if at == layer:
            state["again"] = not state["again"]
            if state["again"]:
                raise kind

    toy.decoder.before_layer = before


def clean(toy, storage, params, requests):
    engine = toy.engine(toy.cache(storage, **params), step_tokens=8)
    drain(engine, requests, ())
    return engine


@pytest.mark.parametrize(("storage", "params"), STORAGES)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", [Planted, KeyboardInterrupt])
def test_an_exception_at_any_layer_of_every_step_changes_nothing(toy, requests, storage, params, layer, kind):
    expected = clean(toy, storage, params, requests)
    cache = toy.cache(storage, **params)
    engine = toy.engine(cache, step_tokens=8)
    once_per_step(toy, layer, kind)
    raised = drain(engine, requests, kind)
    assert raised == len(expected.log.steps)
    assert engine.completions == expected.completions
    assert engine.log == expected.log
    assert cache.stats().in_use_bytes == 0


@pytest.mark.parametrize(("storage", "params"), STORAGES)
@pytest.mark.parametrize("where", ["sampler", "commit"])
def test_an_exception_after_the_layers_changes_nothing(toy, requests, storage, params, where, monkeypatch):
    expected = clean(toy, storage, params, requests)
    cache = toy.cache(storage, **params)
    engine = toy.engine(cache, step_tokens=8)
    owner, name = (engine, "_sampler") if where == "sampler" else (cache, "commit")
    real, state = getattr(owner, name), {"again": False}

    def failing(*args):
        state["again"] = not state["again"]
        if state["again"]:
            raise Planted
        return real(*args)

    monkeypatch.setattr(owner, name, failing)
    assert drain(engine, requests, Planted) == len(expected.log.steps)
    assert engine.completions == expected.completions
    assert engine.log == expected.log


def test_an_exception_while_memory_is_short_changes_no_answer(toy, make_prompt):
    requests = [Request(row, make_prompt(row, 6), 10) for row in range(3)]
    expected = toy.answers(toy.cache("none"), requests)
    cache = toy.cache("paged", 7 * 4 * toy.row_bytes, page_size=4)
    engine = toy.engine(cache)
    once_per_step(toy, 1, Planted)
    assert drain(engine, requests, Planted) > 0
    assert engine.preemptions > 0
    assert {id_: done.tokens for id_, done in engine.completions.items()} == expected
    assert cache.stats().in_use_bytes == 0


def test_an_aborted_step_leaves_no_event(toy, make_prompt):
    engine = toy.engine(toy.cache("paged"))
    engine.submit(Request(0, make_prompt(0, 4), 2), 0.0)
    once_per_step(toy, 0, Planted)
    with pytest.raises(Planted):
        engine.step()
    assert (engine.log.steps, engine.log.tokens) == ([], [])
