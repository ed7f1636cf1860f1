"""Leaks: nothing of one sequence, call or owner reaches another.

Prompts use disjoint token ids, memory is tight so that it is handed on, and runs are compared bit for bit where the tiles are
the same.
"""

from __future__ import annotations

import numpy as np

from harness.conformance.poison import poison_free_memory
from harness.conformance.promise import NotApplicable, promise
from harness.conformance.subject import Subject, stored
from harness.conformance.world import World, budget_for, tokens
from strategies.geometry import CacheFull


@promise("L", "L04")
def six_interleaved_sequences_answer_as_if_alone(subject: Subject) -> None:
    """Six prompts, interleaved chunks, decode, a cancel and a restart: every row equals its own oracle."""
    world = World(subject, subject.geometry(heads=(8, 2), head_dim=8))
    rng, sids = np.random.default_rng(subject.seed), [world.open(expect=24) for _ in range(6)]
    for step in range(9):
        if step == 5:
            world.close(sids[2])
            sids[2] = world.open(expect=24)
        chosen = [row for row in range(6) if rng.random() < 0.7] or [0]
        world.step({sids[row]: [10 * row + int(rng.integers(10)) for _ in range(int(rng.integers(1, 4)))] for row in chosen})


@promise("L", "L10", "D01")
def pads_reach_no_sequence(subject: Subject) -> None:
    """Steps of one token, padded to more spans than there are sequences: the answers without pads, in as many bytes as billed."""
    geometry = subject.geometry()
    if not subject.make(geometry, None, subject.ops).capturable:
        raise NotApplicable("is not capturable, so its plans are never padded")
    lengths, steps = (11, 7, 3), 9  # in the end whole pages of 2 or 4 tokens: the last row of the pool is somebody's
    plain, padded = World(subject, geometry), World(subject, geometry)
    padded.cache.reserve_scratch()
    billed = padded.cache.bytes_for([length + steps for length in lengths], max(lengths))
    own, sids = (
        [world.start(tokens(length, lane), expect=length + steps) for lane, length in enumerate(lengths)] for world in (plain, padded)
    )
    for step in range(steps):
        news = {sid: [10 * lane + step] for lane, sid in enumerate(sids)}
        if step == 4:
            plan = padded.plan(news, len(sids) + 1)
            padded.run(plan, news, 1)
            padded.abort(plan)
        plan = padded.plan(news, len(sids) + 1 - step % 2)
        got = padded.run(plan, news)
        padded.commit(plan, news)
        want = plain.step({sid: [10 * lane + step] for lane, sid in enumerate(own)})
        for mine, other in zip(own, sids, strict=True):
            worst = max(np.abs(a - b).max() for a, b in zip(want[mine], got[other], strict=True))
            assert worst < 1e-9, f"step {step}: pads move an answer by {worst:.3g}"
    held = padded.cache.stats().reserved_bytes
    assert held == billed, f"{billed} bytes are billed and {held} reserved once plans may be padded"


@promise("L", "L01", "L03", "L08")
def memory_handed_on_gives_the_bits_of_fresh_memory(subject: Subject) -> None:
    """The same prompt after others have used and left every row equals a first run, bit for bit; freed memory is poisoned before."""
    geometry = subject.geometry()
    stored(subject, geometry)
    budget = budget_for(subject, geometry, 2, 14)
    fresh, used = World(subject, geometry, budget), World(subject, geometry, budget)
    for number in (1, 2):
        sids = [used.start(tokens(13, number + lane), 5, expect=14) for lane in (0, 3)]
        used.step({sid: [number] for sid in sids})
        for sid in sids:
            used.close(sid)
        if used.cache.stats().cached_bytes == 0:
            poison_free_memory(used.cache.tensors())
    _same_bits(_run(fresh), _run(used), "used memory changes the answer")


@promise("L", "L03", "R01")
def emptied_sequence_is_like_new(subject: Subject) -> None:
    """Truncated to nothing, a sequence answers a second prompt as a new one would, bit for bit, and no row of zeros is attended."""
    geometry = subject.rewindable(5)
    emptied, fresh = World(subject, geometry), World(subject, geometry)
    sid = emptied.start(tokens(5), expect=12)
    emptied.truncate(sid, 0)
    _same_bits(
        emptied.feed_on(sid, tokens(3, 1)), fresh.feed_on(fresh.open(expect=12), tokens(3, 1)), "an emptied sequence differs from a new one"
    )


@promise("L", "L13", "L04")
def calls_repeat_bit_for_bit(subject: Subject) -> None:
    """The same request three times on one cache, one after another: three identical answers."""
    world = World(subject, subject.geometry())
    runs = [_run(world) for _ in range(3)]
    for run in runs[1:]:
        _same_bits(runs[0], run, "the same request gave another answer the next time")


@promise("L", "L01")
def closed_sequences_are_gone(subject: Subject) -> None:
    """A closed id is refused by every call, is never handed out again, and refusing it disturbs nobody."""
    world = World(subject, subject.geometry())
    dead, alive = world.start(tokens(6)), world.start(tokens(5, 1))
    world.close(dead)
    for call in (
        world.cache.held,
        world.cache.fork,
        world.cache.close,
        lambda sid: world.cache.truncate(sid, 1),
        lambda sid: world.cache.plan({sid: 9}),
    ):
        try:
            call(dead)
        except KeyError:
            continue
        raise AssertionError(f"a closed sequence was accepted by {getattr(call, '__name__', 'a call')}")
    assert world.open() != dead, f"sequence id {dead} was handed out twice"
    world.step({alive: [3]})


@promise("L", "L05", "L12", "L14")
def only_a_prefix_of_the_same_tokens_is_adopted(subject: Subject) -> None:
    """A repeated prompt may be adopted up to its last token; other tokens, or the same after another beginning, never are."""
    world, prompt = _roomy(subject), _adopting(subject, 12)
    answers = []
    for _ in range(4):
        sid = world.open(prompt)
        held = len(world.logs[sid])
        answers.append(world.feed_on(sid, prompt[held:])[-1][-1])
        world.feed_on(sid, [7, 8, 9], 1)
        world.close(sid)
    assert max(np.abs(answer - answers[0]).max() for answer in answers) < 1e-9, "a repeated prompt changes its answer"
    for other in (tokens(12, 2), [2, *prompt[1:]], [*tokens(4, 3), *prompt[:8]]):
        sid = world.open(other)
        assert world.cache.held(sid) == 0, f"{world.cache.held(sid)} tokens of a prompt that was never fed were adopted"
        world.feed_on(sid, other)
        world.close(sid)
    for cut in (2, 4, 8):  # both halves are known, but not one after the other: the shadow knows what may be adopted
        mixed = [*tokens(12, 2)[:cut], *prompt[cut:]]
        world.close(world.start(mixed))
    sid = world.open([*prompt, *tokens(6, 4)])
    assert world.cache.held(sid) > 0, "a prompt that extends a known one adopts nothing"


@promise("L", "L12", "L14")
def repeated_prompts_answer_alike_whatever_is_reused(subject: Subject) -> None:
    """Prompts of 4, 8, 9 and 14 tokens three times each, six more tokens every time: identical answers, and always a token left to run."""
    _adopting(subject, 12)
    geometry = subject.geometry(windows=(4, None))
    world = World(subject, geometry, budget_for(subject, geometry, 5, 40))
    for length in (4, 8, 9, 14):
        answers = []
        for _ in range(3):
            sid = world.open(tokens(length, 5))
            fed = len(world.logs[sid])
            first = world.feed_on(sid, tokens(length, 5)[fed:])
            more = world.feed_on(sid, tokens(6, 7), 1)
            answers.append([layer[-1] for layer in (*first, *more)])
            world.close(sid)
        for answer in answers[1:]:
            assert all(np.abs(a - b).max() < 1e-9 for a, b in zip(answers[0], answer, strict=True)), (
                f"a prompt of {length} tokens answers differently when repeated"
            )


@promise("L", "L08")
def what_was_never_committed_is_never_adopted(subject: Subject) -> None:
    """A prompt that was planned, even attended, and aborted leaves no prefix; one that was half fed leaves at most that half."""
    world, prompt = _roomy(subject), _adopting(subject, 12)
    sid = world.open(prompt)
    plan = world.plan({sid: prompt})
    world.run(plan, {sid: prompt})
    world.abort(plan)
    world.close(sid)
    sid = world.open(prompt)
    assert world.cache.held(sid) == 0, "an aborted step was published"
    world.feed_on(sid, prompt[:5])
    world.close(sid)
    assert len(world.logs[world.open(prompt)]) <= 5, "more was adopted than was ever fed"


@promise("L", "L05", "R07", "L12")
def what_was_published_is_never_written_to(subject: Subject) -> None:
    """A sequence goes back into pages that others may adopt and writes something else there: who adopts them still reads the old rows."""
    _adopting(subject, 12)
    geometry = subject.rewindable(4)
    world = World(subject, geometry, budget_for(subject, geometry, 5, 40))
    for back in (1, 2, 3, 4):
        prompt = tokens(12, back)
        sid = world.start(prompt, 5)
        world.truncate(sid, 12 - back)
        world.feed_on(sid, tokens(1 if back > 2 else back + 2, 7), 1)
        other = world.start([*prompt, 5], 5)
        world.step({other: [back], sid: [back + 1]})
        world.close(sid)
        world.close(other)


@promise("L", "A07", "L01")
def adopted_memory_is_not_handed_to_others(subject: Subject) -> None:
    """Kept prefixes give way when memory is needed, and then they are no longer found; nobody reads another's rows."""
    prompt = _adopting(subject, 12)
    geometry = subject.geometry()
    budget = budget_for(subject, geometry, 2, 13)
    world = World(subject, geometry, budget)
    for number in range(5):
        first = world.start(prompt, expect=13)
        second = world.start(tokens(12, number), expect=13)
        world.step({first: [1], second: [2]})
        world.close(first)
        world.close(second)
    try:
        for number in range(3, 9):
            world.start(tokens(12, number), expect=13)
    except CacheFull:
        world.close_all()
    world.feed_on(world.start(prompt), [4], 1)


def _adopting(subject: Subject, length: int) -> list[int]:
    """A prompt that this strategy would adopt when it comes again; NotApplicable when it adopts nothing."""
    world, prompt = _roomy(subject), tokens(length)
    world.close(world.start(prompt))
    if world.cache.held(world.open(prompt)) == 0:
        raise NotApplicable("adopts no prefix")
    return prompt


def _roomy(subject: Subject) -> World:
    """Room enough to keep what ended."""
    geometry = subject.geometry()
    return World(subject, geometry, budget_for(subject, geometry, 5, 40))


def _run(world: World) -> list[np.ndarray]:
    sid = world.open(expect=14)
    outputs = [*world.feed_on(sid, tokens(11), 6), *world.feed_on(sid, tokens(3, 1), 1)]
    world.close(sid)
    return outputs


def _same_bits(one: list[np.ndarray], other: list[np.ndarray], what: str) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True)), what
