"""Non-finite and extreme values: memory that is not read cannot matter, and finite inputs give finite, exact answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.conformance.poison import FILLS
from harness.conformance.promise import promise
from harness.conformance.subject import Subject, stored
from harness.conformance.toy import RandomFeed, Rows
from harness.conformance.world import World, tokens
from strategies.geometry import Geometry


@dataclass(frozen=True)
class ScaledFeed:
    """Random rows times a factor for each role; zero_rows makes K and V of some positions all zero."""

    base: RandomFeed
    factors: tuple[float, float, float]
    zero_rows: tuple[int, ...] = ()

    def rows(self, layer: int, tokens: Sequence[int], start: int, stop: int) -> Rows:
        q, k, v = (rows * factor for rows, factor in zip(self.base.rows(layer, tokens, start, stop), self.factors, strict=True))
        for position in self.zero_rows:
            if start <= position < stop:
                k[position - start] = v[position - start] = 0.0
        return q, k, v


@dataclass(frozen=True)
class ConstantFeed:
    """Every value of q and k is `value`, of v one more; the key of position 1 is zero."""

    geometry: Geometry
    value: float

    def rows(self, layer: int, tokens: Sequence[int], start: int, stop: int) -> Rows:
        shape, count = self.geometry.layers[layer], stop - start
        k = np.full((count, shape.kv_heads, shape.head_dim), self.value)
        k[np.arange(start, stop) == 1] = 0.0
        return np.full((count, self.geometry.query_heads, shape.head_dim), self.value), k, np.full_like(k, self.value + 1.0)


@promise("N", "N01", "B04", "L10")
def memory_that_is_not_read_changes_no_bit(subject: Subject) -> None:
    """Every row that no query of a step may see is NaN, inf, -inf, 65504 and -1e4 in turn: identical bits, all finite."""
    for heads, head_dim, fills in (((6, 3), 24, FILLS), ((8, 2), 8, FILLS[::3])):
        geometry = subject.geometry(heads=heads, head_dim=head_dim, windows=(None, 4), dtype="float32")
        runs = [_life(World(subject, geometry, fill=fill, shadowed=fill is fills[0])) for fill in fills]
        assert all(np.isfinite(out).all() for out in runs[0]), "poison reached an output"
        for fill, run in zip(fills[1:], runs[1:], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(runs[0], run, strict=True)), f"memory full of {fill} changes an output"


@promise("N", "N05")
def zero_and_constant_rows_read_back_exactly(subject: Subject) -> None:
    """All-zero tokens, all-zero runs and rows of one value: finite, exact, and the neighbours do not notice."""
    geometry = subject.geometry(head_dim=24)
    length = min(subject.facts(geometry).reach, 40) + 2
    for zeros in ((0,), (1, 2, 3, 4, 5, 6, 7, 8), tuple(range(length + 4))):
        _run(subject, geometry, ScaledFeed(RandomFeed(geometry, subject.seed), (1.0, 1.0, 1.0), zeros), length)
    for value in (0.5, -3.0):
        world = World(subject, geometry, feed=ConstantFeed(geometry, value))
        sid = world.open(expect=length)
        outputs = world.feed_on(sid, tokens(length), 4)
        want = value + 1.0
        if subject.facts(geometry).lossless:
            assert np.abs(outputs[0][-1] - want).max() < 1e-9, f"rows of {want} come back as {outputs[0][-1].flat[0]}"


@promise("N", "N06")
def huge_scores_do_not_overflow(subject: Subject) -> None:
    """q = k = 24 at head_dim 128: a raw product of 73,728, beyond float16; and scores of +-6e4. Finite and equal to the oracle."""
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        geometry = subject.geometry(heads=(4, 1), head_dim=128, windows=(None, None), dtype=dtype)
        _run(subject, geometry, ConstantFeed(geometry, 24.0), 6)
    geometry = subject.geometry(head_dim=16, windows=(None, 5))
    for factor in (100.0, -100.0):
        _run(subject, geometry, ScaledFeed(RandomFeed(geometry, subject.seed), (factor, 100.0, 1.0)), 11)


@promise("N", "N03", "N08")
def one_visible_key_gives_its_value(subject: Subject) -> None:
    """A first token, and with a window of 1 every token, answers with its own value row; many tiles before it are empty."""
    geometry = subject.geometry(head_dim=8, windows=(1, 4))
    facts = subject.facts(geometry)
    world = World(subject, geometry)
    sid = world.open(expect=40)
    first = world.step({sid: [3]})[sid]
    if facts.lossless:
        v = world.feed.rows(0, [3], 0, 1)[2]
        group = geometry.query_heads // geometry.layers[0].kv_heads
        assert np.abs(first[0][0] - v[0].repeat(group, 0)).max() < 1e-9, "a single key does not give its value back"
    world.feed_on(sid, tokens(30), 25)
    world.feed_on(sid, tokens(6, 1), 1)


@promise("N", "N01", "L04")
def a_mate_full_of_nan_infects_nobody(subject: Subject) -> None:
    """One sequence of a batch is fed NaN; the other rows of the same steps keep the bits they have without it."""
    geometry = subject.geometry()
    stored(subject, geometry)
    clean, beside = (World(subject, geometry, shadowed=False) for _ in range(2))
    for world in (clean, beside):
        world.open(expect=12)
        world.open(expect=12)
    beside.feed = _NanFeed(RandomFeed(geometry, subject.seed))
    for step in ([0, 1, 2, 3], [4], [5, 6]):
        want = clean.step({0: step, 1: [90] * len(step)})
        got = beside.step({0: step, 1: [90] * len(step)})
        assert np.isnan(got[1][0]).any(), "the sick sequence should answer NaN"
        assert all(np.array_equal(a, b) for a, b in zip(want[0], got[0], strict=True)), "NaN crossed from one sequence to another"


@promise("N", "N05", "N06")
def tiny_and_large_rows_keep_their_format(subject: Subject) -> None:
    """Rows of 1e-7 and of 1e4 in one life; scales that round to zero or to the largest float16 do what is written."""
    geometry = subject.geometry(head_dim=24)
    length = min(subject.facts(geometry).reach, 40)
    for factors in ((1e3, 1e-7, 1e-7), (1e-4, 1e4, 1e4), (1.0, 1e-9, 1e4)):
        _run(subject, geometry, ScaledFeed(RandomFeed(geometry, subject.seed), factors), length)


@promise("N", "N06")
def softcap_bounds_the_scores(subject: Subject) -> None:
    """A geometry with a softcap equals the oracle, and differs from the one without."""
    capped = subject.geometry(softcap=5.0)
    free = subject.geometry()
    one, other = (_run(subject, geometry, RandomFeed(geometry, subject.seed, spread=3.0), 9) for geometry in (capped, free))
    moved = np.abs(one[0] - other[0]).max()
    assert moved > 1e-3, "the softcap changes nothing"


@dataclass(frozen=True)
class _NanFeed:
    """NaN in K and V of sequences made of token 90."""

    base: RandomFeed

    def rows(self, layer: int, tokens: Sequence[int], start: int, stop: int) -> Rows:
        q, k, v = self.base.rows(layer, tokens, start, stop)
        return (q, k * np.nan, v * np.nan) if tokens[0] == 90 else (q, k, v)


def _life(world: World) -> list[np.ndarray]:
    first, second = world.open(expect=20), world.open(expect=9)
    outputs = [
        out for news in ({first: tokens(7)}, {first: [1], second: tokens(5, 1)}) for outs in world.step(news).values() for out in outs
    ]
    child = world.fork(first)
    for step in range(6):
        news = {child: [step], second: [step], first: [step + 1]} if step < 4 else {first: [step]}
        outputs += [out for outs in world.step(news).values() for out in outs]
    return outputs


def _run(subject: Subject, geometry: Geometry, feed: object, length: int) -> list[np.ndarray]:
    world = World(subject, geometry, feed=feed)
    outputs = world.feed_on(world.open(expect=length + 4), tokens(length), 5)
    more = world.feed_on(0, tokens(4, 1), 1)
    joined = [np.concatenate(pair) for pair in zip(outputs, more, strict=True)]
    assert all(np.isfinite(out).all() for out in joined), "finite inputs gave an output that is not finite"
    return joined
