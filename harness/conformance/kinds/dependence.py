"""Dependence: a row's answer is its own, whoever else is in the batch, wherever it lies, however much memory there is."""

from __future__ import annotations

import numpy as np

from harness.conformance.promise import promise
from harness.conformance.subject import Subject, stored
from harness.conformance.world import World, budget_for, tokens


@promise("D", "D01", "D02", "D05", "L04")
def batch_mates_do_not_matter(subject: Subject) -> None:
    """A prompt of 5 tokens alone, then first, in the middle and last beside mates of 1, 5 and 13 tokens, and eight times itself."""
    prompt, rest = tokens(5), tokens(4, 1)
    alone = _beside(subject, prompt, rest, (), 0)
    for mates, place in (((1,), 0), ((1, 13), 1), ((5, 13), 2), ((9, 3), 0), ((4, 4), 1), ((5,) * 7, 3)):
        got = _beside(subject, prompt, rest, mates, place)
        worst = max(np.abs(a - b).max() for a, b in zip(alone, got, strict=True))
        assert worst < 1e-9, f"mates of {mates} tokens, place {place}: the answer moves by {worst:.3g}"


@promise("D", "D04", "X01")
def placement_does_not_matter(subject: Subject) -> None:
    """Memory is fragmented in two different ways before the prompt comes: its answers are the same to the bit."""
    geometry = subject.geometry()
    stored(subject, geometry)
    budget = budget_for(subject, geometry, 8, 12)
    answers = []
    for order in ((), (0, 2, 4), (5, 1, 3), (4, 0, 5, 2)):
        world = World(subject, geometry, budget)
        for number in range(6):
            world.start(tokens(5 + number, number), expect=12)
        for sid in order:
            world.close(sid)
        sid = world.open(expect=12)
        answers.append([*world.feed_on(sid, tokens(9), 4), *world.feed_on(sid, [1, 2, 3], 1)])
    for answer in answers[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(answers[0], answer, strict=True)), "the place of its rows changes an answer"


@promise("D", "D04", "C07")
def capacity_does_not_matter(subject: Subject) -> None:
    """Just enough memory, four and sixteen times as much, and no budget at all: the same bits."""
    geometry = subject.geometry()
    need = budget_for(subject, geometry, 1, 12)
    answers = []
    for budget in (None, None) if need is None else (need, 4 * need, 16 * need, None):
        world = World(subject, geometry, budget)
        sid = world.open(expect=12)
        answers.append([*world.feed_on(sid, tokens(9), 4), *world.feed_on(sid, [1, 2, 3], 1)])
    for answer in answers[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(answers[0], answer, strict=True)), "the size of the memory changes an answer"


@promise("D", "D08", "L03")
def every_call_on_one_cache_is_exact(subject: Subject) -> None:
    """Calls of 6, 1, 3, 1 and 5 tokens on one object equal one call of 16: each call, not only the last."""
    geometry = subject.geometry(windows=(4, None))
    whole = World(subject, geometry)
    want = whole.feed_on(whole.open(expect=16), tokens(16))
    world, at = World(subject, geometry), 0
    sid = world.open(expect=16)
    for count in (6, 1, 3, 1, 5):
        got = world.feed_on(sid, tokens(16)[at : at + count])
        worst = max(np.abs(a - b[at : at + count]).max() for a, b in zip(got, want, strict=True))
        assert worst < 1e-9, f"the call for tokens {at}..{at + count - 1} is off by {worst:.3g}"
        at += count


@promise("D", "D05")
def working_dtypes_stay_within_the_derived_bound(subject: Subject) -> None:
    """float32, bfloat16 and float16: every output of a ragged, forked life is as near to float64 as rounding explains."""
    for dtype in ("float32", "bfloat16", "float16"):
        geometry = subject.geometry(heads=(6, 3), head_dim=24, dtype=dtype)
        world = World(subject, geometry)
        length = min(subject.facts(geometry).reach, 60)
        first, second = world.start(tokens(length), 7), world.start(tokens(4, 2), expect=9)
        child = world.fork(first)
        for step in range(3):
            world.step({child: [step], second: [step + 1], first: [step + 2, step]})


@promise("D", "D02", "B05")
def batches_of_whole_and_partial_pages_are_exact(subject: Subject) -> None:
    """Lengths (5, 3, 9), (4, 4) and (1, 1, 1) in one batch each, from empty and from running sequences."""
    geometry = subject.geometry(heads=(4, 4), head_dim=8)
    for lengths in ((5, 3, 9), (4, 4), (1, 1, 1)):
        world = World(subject, geometry)
        sids = [world.open(expect=24) for _ in lengths]
        for round_ in range(2):
            world.step({sid: tokens(length, lane + round_) for lane, (sid, length) in enumerate(zip(sids, lengths, strict=True))})


def _beside(subject: Subject, prompt: list[int], rest: list[int], mates: tuple[int, ...], place: int) -> list[np.ndarray]:
    world = World(subject, subject.geometry(heads=(8, 2)))
    lengths = [*mates[:place], len(prompt), *mates[place:]]
    sids = [world.open(expect=length + len(rest)) for length in lengths]
    news = {sid: tokens(length, 2 + lane) for lane, (sid, length) in enumerate(zip(sids, lengths, strict=True))}
    own = sids[min(place, len(mates))]
    parts = [world.step(news | {own: prompt})[own]]
    parts += [world.step({sid: [token] for sid in sids})[own] for token in rest]
    return [np.concatenate(layer) for layer in zip(*parts, strict=True)]
