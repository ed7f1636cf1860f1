"""Positions: whatever happened before, the next token's position is the number of real tokens before it.

The integers themselves are checked (in every plan, by the world): rotary outputs cannot see a uniform shift.
"""

from __future__ import annotations

from dataclasses import replace

from harness.conformance.promise import NotApplicable, promise
from harness.conformance.subject import Subject
from harness.conformance.world import World, probe, tokens
from strategies.geometry import CannotRewind, Geometry


@promise("P", "P01", "P09")
def ragged_prompts_keep_their_own_positions(subject: Subject) -> None:
    """Prompts of 3 and 7 tokens in one batch, then decode: positions 0..6 and 0..10, logits rows last of each span."""
    world = World(subject, subject.geometry())
    short, long = world.open(expect=9), world.open(expect=13)
    world.step({short: tokens(3), long: tokens(7, 1)})
    for step in range(4):
        world.step({long: [step + 1], short: [step + 2]})
    assert (len(world.logs[short]), len(world.logs[long])) == (7, 11)


@promise("P", "P03")
def length_counts_tokens_whichever_layer_is_windowed(subject: Subject) -> None:
    """6 + 4 tokens, then 3: the plan says 10, 11, 12, with the windowed layer first and last."""
    geometry = subject.geometry(windows=(4, None))
    for layers in (geometry.layers, geometry.layers[::-1]):
        world = World(subject, replace(geometry, layers=layers))
        sid = world.start(tokens(6), expect=13)
        world.feed_on(sid, tokens(4, 1))
        plan = world.plan({sid: tokens(3, 2)})
        assert plan.positions.tolist()[-3:] == [10, 11, 12]
        world.abort(plan)


@promise("P", "P08")
def rewind_within_reach_is_exact_and_beyond_it_is_refused(subject: Subject) -> None:
    """Every length within `rewind` of the longest is legal; any other either works exactly or raises CannotRewind and changes nothing."""
    for windows in ((4, None), (None, None)):
        _cut_everywhere(subject, subject.geometry(windows=windows))


def _cut_everywhere(subject: Subject, geometry: Geometry) -> None:
    facts = subject.facts(geometry)
    length = min(facts.reach, 60) + 4
    world = World(subject, geometry)
    sid = world.start(tokens(length), 5)
    for target in range(length):
        child = world.fork(sid)
        try:
            world.truncate(child, target)
        except CannotRewind:
            assert length - target > facts.rewind, f"going back {length - target} tokens was refused; {facts.rewind} were promised"
        world.feed_on(child, tokens(3, 1), 2)
        world.close(child)
    world.feed_on(sid, tokens(2, 1))


@promise("P", "P08", "P05")
def rewind_is_counted_from_the_longest_length(subject: Subject) -> None:
    """Going back, forward and back again within `rewind` of the longest length stays legal; positions follow."""
    geometry = subject.rewindable(1)
    facts = subject.facts(geometry)
    slack = int(min(facts.rewind, 4))
    world = World(subject, geometry)
    sid = world.start(tokens(facts.reach + slack), 4)
    high = len(world.logs[sid])
    for back in range(1, slack + 1):
        world.truncate(sid, high - back)
        world.feed_on(sid, tokens(back, back), 1)


@promise("P", "P05", "B02")
def sinks_keep_their_true_positions(subject: Subject) -> None:
    """Absolute positions are kept: sink tokens stay positions 0, 1, .. for ever and the next token is never re-numbered."""
    geometry = subject.geometry(head_dim=80, windows=(None, None))
    facts = subject.facts(geometry)
    if facts.sinks == 0:
        raise NotApplicable("has no sinks")
    length = facts.reach + 4
    sets = probe(subject, geometry, [length - 6, 1, 1, 1, 1, 1, 1])
    assert set(range(facts.sinks)) <= sets[0][-1], f"the last query attends {sorted(sets[0][-1])}: sinks are missing"
    assert len(sets[0][-1]) == facts.sinks + facts.window


@promise("P", "P03", "P09")
def forks_and_rewinds_number_tokens_alike(subject: Subject) -> None:
    """A child counts on from its parent, a rewound sequence from where it was cut; the world checks each plan's integers."""
    world = World(subject, subject.rewindable(0))
    parent = world.start(tokens(9), 4)
    child = world.fork(parent)
    world.step({child: [1, 2], parent: [3]})
    if world.cache.rewind >= 1:
        world.truncate(child, 10)
    world.step({parent: [4, 5], child: [6]})
