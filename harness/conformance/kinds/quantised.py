"""Quantisation: a row reads back as its written format says, whatever its neighbours, its call and its place.

The shadow reads rows back with independent NumPy formats, so in float64 every answer is exact; the checks here choose the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.conformance.promise import NotApplicable, promise
from harness.conformance.subject import Facts, Subject
from harness.conformance.toy import RandomFeed, Rows
from harness.conformance.world import World, tokens
from strategies.geometry import Geometry


@dataclass(frozen=True)
class EditedFeed:
    """Random rows, then edited: `edit(layer, k, v, start)` may change k and v [t, Hkv, D] and returns them."""

    base: RandomFeed
    edit: Callable[[int, np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]

    def rows(self, layer: int, tokens: Sequence[int], start: int, stop: int) -> Rows:
        q, k, v = self.base.rows(layer, tokens, start, stop)
        return q, *self.edit(layer, k.copy(), v.copy(), start)


@promise("Q", "Q07", "Q03", "Q05", "X05")
def rows_read_back_as_written_for_every_head_dim(subject: Subject) -> None:
    """head_dims below, at, above and off every group size; short last groups have a scale of their own."""
    _lossy(subject, subject.geometry())
    for head_dim in (8, 20, 24, 80, 100, 128):
        geometry = subject.geometry(heads=(4, 1), head_dim=head_dim)
        _run(subject, geometry, RandomFeed(geometry, subject.seed), min(subject.facts(geometry).reach, 40))


@promise("Q", "Q01", "M07", "Q09")
def the_codec_is_really_read(subject: Subject) -> None:
    """Outputs stand where the codec puts them and not where raw rows would: a claimed codec that stores floats fails here."""
    geometry = subject.geometry(windows=(None, None))
    facts = _lossy(subject, geometry)
    world = _run(subject, geometry, None, facts.reach)
    seen = world.cache.codec_seen
    assert seen is not None and abs(seen - 1) < 1e-3, f"outputs moved {seen} of the way from raw rows to coded ones"


@promise("Q", "Q09", "Q01")
def tokens_in_the_residual_are_exact_and_past_it_are_not(subject: Subject) -> None:
    """Before the first aged token nothing is lost, also for a prompt fed in one call; right after it something is."""
    geometry = subject.geometry(windows=(None, None))
    facts = _lossy(subject, geometry)
    if facts.first_aged == 1:
        raise NotApplicable("keeps no residual: every row is coded at once")
    world = World(subject, geometry)
    sid = world.start(tokens(facts.first_aged - 1))
    assert world.cache.codec_seen is None, "a token inside the residual was read through the codec"
    world.feed_on(sid, tokens(1, 1))
    assert world.cache.codec_seen is not None


@promise("Q", "Q01", "Q05", "D02")
def codes_do_not_depend_on_how_tokens_were_fed(subject: Subject) -> None:
    """One call, ones, threes, beside other sequences: the last query's answer is the same."""
    geometry = subject.geometry(head_dim=24, windows=(None, None))
    facts = _lossy(subject, geometry)
    length, answers = min(facts.reach + 5, 60), []
    for size, mates in ((length, 0), (1, 0), (3, 0), (5, 2)):
        world = World(subject, geometry)
        for mate in range(mates):
            world.start(tokens(3 + mate, mate + 1))
        sid = world.start(tokens(length), size)
        answers.append(world.feed_on(sid, [3]))
    for answer in answers[1:]:
        assert all(np.abs(a - b).max() < 1e-9 for a, b in zip(answers[0], answer, strict=True)), (
            "the way tokens were fed changes their codes"
        )


@promise("Q", "Q03", "Q13", "Q09")
def data_far_from_zero_keeps_its_format(subject: Subject) -> None:
    """Rows around 5.5, -5.5 and 100, and two channels with a bias of 50: codes, scales and zero points as written."""
    geometry = subject.geometry(head_dim=24)
    _lossy(subject, geometry)
    length = min(subject.facts(geometry).reach, 40)
    for offset in (5.5, -5.5, 100.0):
        _run(subject, geometry, RandomFeed(geometry, subject.seed, spread=0.3, offset=offset), length)

    def biased(layer: int, k: np.ndarray, v: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        k[..., [2, 7]] += 50
        return k, v

    _run(subject, geometry, EditedFeed(RandomFeed(geometry, subject.seed), biased), length)


@promise("Q", "Q06")
def scaling_the_data_scales_the_answer(subject: Subject) -> None:
    """K times 8 with q over 8, and V times 1/4: outputs scale by 1/4 exactly, because every scale went where it belongs."""
    geometry = subject.geometry(head_dim=24, windows=(None, None))
    facts = _lossy(subject, geometry)
    base = _outputs(subject, geometry, RandomFeed(geometry, subject.seed), facts.reach)

    def scaled(layer: int, k: np.ndarray, v: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        return k, v / 4

    moved = _outputs(subject, geometry, EditedFeed(RandomFeed(geometry, subject.seed), scaled), facts.reach)
    if subject.make(geometry, None, subject.ops).codec_v.name == "fp8":
        return
    worst = max(np.abs(a / 4 - b).max() for a, b in zip(base, moved, strict=True))
    assert worst < 1e-6, f"V over 4 does not give outputs over 4: off by {worst:.3g}"


@promise("Q", "Q11", "R02")
def keys_are_never_used_as_values(subject: Subject) -> None:
    """K random and V = 7 in layer 0: every output is 7 as coded, on every head."""
    geometry = subject.geometry(windows=(None, None))

    def sevens(layer: int, k: np.ndarray, v: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        return (k, np.full_like(v, 7.0)) if layer == 0 else (k, v)

    outputs = _outputs(subject, geometry, EditedFeed(RandomFeed(geometry, subject.seed), sevens), subject.facts(geometry).reach)
    assert np.abs(outputs[0] - 7).max() < 7 / 14, f"outputs over a constant V of 7 reach {outputs[0].min():.3f}..{outputs[0].max():.3f}"


@promise("Q", "Q03", "Q07", "X03")
def neighbouring_heads_do_not_share_a_scale(subject: Subject) -> None:
    """KV head 1 is a thousand times larger: the answers of the other heads keep their bits."""
    geometry = subject.geometry(heads=(6, 3), head_dim=24, windows=(None, None))
    if geometry.layers[0].kv_heads < 2:
        raise NotApplicable("has one KV head")
    _lossy(subject, geometry)
    length = min(subject.facts(geometry).reach, 40)

    def loud(layer: int, k: np.ndarray, v: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        k[:, 1] *= 1000
        v[:, 1] *= 1000
        return k, v

    quiet = _outputs(subject, geometry, RandomFeed(geometry, subject.seed), length)
    noisy = _outputs(subject, geometry, EditedFeed(RandomFeed(geometry, subject.seed), loud), length)
    group = geometry.query_heads // geometry.layers[0].kv_heads
    kept = [head for head in range(geometry.query_heads) if head // group != 1]
    assert all(np.array_equal(a[:, kept], b[:, kept]) for a, b in zip(quiet, noisy, strict=True)), "a loud head changed a quiet one"


@promise("Q", "P07", "Q01")
def a_row_is_coded_once(subject: Subject) -> None:
    """Forty further steps with forks, moves and rewinds add no error to old rows: the oracle, which codes once, still agrees to 1e-9."""
    geometry = subject.geometry(head_dim=8, windows=(None, 6))
    facts = _lossy(subject, geometry)
    world = World(subject, geometry)
    sid = world.start(tokens(facts.reach), 3)
    for step in range(20):
        if step % 5 == 4:
            child = world.fork(sid)
            world.step({child: [step], sid: [step + 1]})
            world.close(sid)
            sid = child
        world.feed_on(sid, [step])
        if facts.rewind >= 1 and step % 7 == 6:
            world.truncate(sid, len(world.logs[sid]) - 1)


def _lossy(subject: Subject, geometry: Geometry) -> Facts:
    facts = subject.facts(geometry)
    if facts.lossless:
        raise NotApplicable("stores rows as they are")
    return facts


def _run(subject: Subject, geometry: Geometry, feed: object, length: int) -> World:
    world = World(subject, geometry, feed=feed)
    sid = world.start(tokens(length), 5)
    world.feed_on(sid, tokens(3, 1), 1)
    return world


def _outputs(subject: Subject, geometry: Geometry, feed: object, length: int) -> list[np.ndarray]:
    world = World(subject, geometry, feed=feed)
    return world.feed_on(world.open(expect=length), tokens(length), 5)
