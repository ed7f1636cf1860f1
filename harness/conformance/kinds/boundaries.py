"""Window, page and chunk boundaries: nobody is off by one.

Sets are compared as sets, read off with the attended-set probe; values are compared by the shadow in every step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from harness.conformance.promise import NotApplicable, promise
from harness.conformance.subject import Subject
from harness.conformance.world import World, allowed, probe, tokens
from strategies.geometry import Geometry
from strategies.none import NoCache


@promise("B", "B01", "B02", "B06", "B11", "N03")
def every_query_attends_exactly_the_allowed_set(subject: Subject) -> None:
    """Prefill at once, in ones, in threes and in chunks around the window: the same sets, layer by layer."""
    geometry = subject.geometry(head_dim=80, windows=(None, 5))
    facts = subject.facts(geometry)
    length = facts.reach + 3
    sizes = {length, 1, 3, min(facts.window or 4, length), min(2 * (facts.window or 4), length)}
    for size in sorted(sizes) if length <= 80 else (length, facts.window or 4):
        chunks = [min(size, length - at) for at in range(0, length, size)]
        _expect_rule(subject, geometry, probe(subject, geometry, chunks), f"in chunks of {size}")


@promise("B", "B02", "B06")
def narrow_and_mixed_windows_of_the_model_are_kept(subject: Subject) -> None:
    """Windows of 1, 2 and 4 and none, on four layers at once; no page size divides them all."""
    geometry = subject.geometry(heads=(4, 1), head_dim=24, windows=(1, None, 2, 4))
    if all(layer.window is None for layer in geometry.layers):
        raise NotApplicable("takes no windows of the model's own")
    _expect_rule(subject, geometry, probe(subject, geometry, [7, 1, 5, 1, 1, 1]), "in uneven chunks")


@promise("B", "B08", "B11", "B04")
def no_chunking_changes_an_answer(subject: Subject) -> None:
    """Chunks smaller and larger than page and window give the outputs of one call, row by row."""
    geometry = subject.geometry(heads=(8, 2), head_dim=8, windows=(4, None))
    length = min(subject.facts(geometry).reach, 60) + 6
    prompt = tokens(length)
    whole = _outputs(subject, geometry, prompt, length)
    for size in (1, 2, 3, 5, 7, 12):
        parts = _outputs(subject, geometry, prompt, size)
        worst = max(np.abs(a - b).max() for a, b in zip(whole, parts, strict=True))
        assert worst < 1e-9, f"chunks of {size} move an output by {worst:.3g}"


@promise("B", "B01", "B04", "B05")
def lengths_around_every_boundary_are_exact(subject: Subject) -> None:
    """Prompts one short of, at and one past each page, window and residual edge, then five tokens of decode."""
    geometry = subject.geometry(head_dim=8, windows=(5, None))
    for length in [edge for edge in subject.facts(geometry).edges() if edge + 5 <= geometry.context]:
        world = World(subject, geometry)
        sid = world.start(tokens(length))
        world.feed_on(sid, tokens(5, 1), 1)


@promise("B", "B05")
def no_step_passes_the_context(subject: Subject) -> None:
    """A stop beyond the context is refused by name, and the sequence goes on as before."""
    geometry = subject.geometry(context=12)
    world = World(subject, geometry)
    sid = world.start(tokens(11))
    try:
        world.cache.plan({sid: 13})
    except ValueError:
        pass
    else:
        raise AssertionError("a stop of 13 was planned in a context of 12")
    world.feed_on(sid, [5])


@promise("B", "B06")
def windows_really_hide_something(subject: Subject) -> None:
    """Past a window, outputs differ from full attention: a window that hides nothing passes every other check on short runs."""
    geometry = subject.geometry(windows=(5, None))
    facts = subject.facts(geometry)
    if facts.window is None:
        raise NotApplicable("has no window")
    world = World(subject, geometry)
    prompt = tokens(min(facts.reach, geometry.context - 1))
    out = world.step({world.open(expect=len(prompt)): prompt})
    full = World(_unwindowed(subject, geometry), geometry, shadowed=False)
    plain = full.step({full.open(): prompt})
    moved = max(np.abs(a[-1] - b[-1]).max() for a, b in zip(out[0], plain[0], strict=True))
    assert moved > 1e-3, "the last query answers as if it saw everything"


@promise("B", "B01", "B02", "B06", "Q09")
def the_strategy_as_configured_crosses_its_own_boundaries(subject: Subject) -> None:
    """Its own page size, window, group and residual, not the small ones used elsewhere: chunks, decode, a fork, a cut beyond them all."""
    if subject.configured is None:
        raise NotApplicable("is checked with its own numbers everywhere")
    full = replace(subject, make=subject.configured)
    geometry = full.geometry(heads=(4, 1), head_dim=8, windows=(None, None), context=4096)
    facts = full.facts(geometry)
    if facts.reach > LONGEST:
        raise NotApplicable(f"needs {facts.reach} tokens to cross its boundaries, more than {LONGEST}")
    world = World(full, geometry)
    sid = world.start(tokens(facts.reach - 3), facts.reach // 2 + 1, expect=facts.reach + 9)
    world.feed_on(sid, tokens(6, 1), 1)
    child = world.fork(sid)
    world.step({child: tokens(3, 2), sid: [5]})
    if facts.rewind >= 2:
        world.truncate(child, len(world.logs[child]) - 2)
    world.step({child: [7], sid: [8, 9]})


LONGEST = 2500


def _unwindowed(subject: Subject, geometry: Geometry) -> Subject:
    """Full attention with nothing stored."""
    open_layers = tuple(replace(layer, window=None) for layer in geometry.layers)
    return replace(subject, make=lambda _, budget, ops: NoCache(replace(geometry, layers=open_layers), budget, ops))


def _outputs(subject: Subject, geometry: Geometry, prompt: list[int], size: int) -> list[np.ndarray]:
    world = World(subject, geometry)
    return world.feed_on(world.open(expect=len(prompt)), prompt, size)


def _expect_rule(subject: Subject, geometry: Geometry, sets: list[list[set[int]]], how: str) -> None:
    cache = subject.make(geometry, None, subject.ops)
    for layer, queries in enumerate(sets):
        mask = cache.mask(layer)
        for position, got in enumerate(queries):
            want = allowed(position, mask.window, mask.sinks)
            assert got == want, f"layer {layer}, {how}: query {position} attends {sorted(got)}, it should attend {sorted(want)}"
