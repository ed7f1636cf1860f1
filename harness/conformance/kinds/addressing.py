"""Addressing: every (token, head, lane) has one address, whatever the heads, strides, page size and placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from harness.conformance.promise import NotApplicable, promise
from harness.conformance.subject import Subject
from harness.conformance.toy import HEAD_DIMS, HEADS, RandomFeed, Rows
from harness.conformance.world import World, tokens
from strategies.geometry import Geometry


@dataclass(frozen=True)
class SelectFeed:
    """Each query picks exactly one key: one-hot keys by position modulo D, and a query that only its target answers.

    V holds a different number for every (first token, layer, position, head, lane); the query at i picks position target(i).
    """

    geometry: Geometry
    back: int  # the query at i picks max(0, i - back)

    def rows(self, layer: int, tokens: Sequence[int], start: int, stop: int) -> Rows:
        shape, positions = self.geometry.layers[layer], np.arange(start, stop)
        lanes = np.arange(shape.head_dim)
        k = np.repeat((positions[:, None] % shape.head_dim == lanes).astype(float)[:, None], shape.kv_heads, axis=1)
        targets = np.maximum(positions - self.back, 0)
        hot = (targets[:, None] % shape.head_dim == lanes).astype(float)[:, None]
        q = np.repeat(hot * 1e5, self.geometry.query_heads, axis=1)
        return q, k, unique_values(tokens[0], layer, positions, shape.kv_heads, shape.head_dim)


def unique_values(first: int, layer: int, positions: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
    """[t, heads, D]: a different integer for each logical element of the sequence that begins with token `first`."""
    at = np.arange(heads)[:, None] * head_dim + np.arange(head_dim)
    return (positions[:, None, None] * heads * head_dim + at[None] + 100_003 * layer + 1_000_003 * first).astype(float)


@promise("X", "X01", "X03", "R02", "L10")
def every_element_is_read_where_it_was_written(subject: Subject) -> None:
    """A different integer for each element of two sequences in one batch, each picked alone by one query: exactly it comes back."""
    for heads in HEADS:
        geometry = subject.geometry(heads=heads, head_dim=80, windows=(None, None))
        facts = subject.facts(geometry)
        if not facts.lossless:
            raise NotApplicable("codes its values: integers do not come back (the formats are checked under Q)")
        back = min(3, (facts.window or 4) - 1)
        world = World(subject, geometry, feed=SelectFeed(geometry, back))
        first, second = world.open(expect=20), world.open(expect=20)
        at, group = 0, geometry.query_heads // geometry.layers[0].kv_heads
        for count in (6, 5, 1, 1, 1, 1):
            outputs = world.step({sid: tokens(20, sid + 1)[at : at + count] for sid in (first, second)})
            targets = np.maximum(np.arange(at, at + count) - back, 0)
            for sid, layers in outputs.items():
                for layer, out in enumerate(layers):
                    want = unique_values(world.logs[sid][0], layer, targets, geometry.layers[0].kv_heads, 80).repeat(group, axis=1)
                    assert np.array_equal(out, want), f"layer {layer}: an element was read from another address"
            at += count


@promise("X", "X01", "L10")
def rows_far_into_a_large_pool_are_their_own(subject: Subject) -> None:
    """Twelve sequences fill some 170 rows a layer; then all of them decode in one batch, and every one reads its own."""
    world = World(subject, subject.geometry(heads=(4, 1), head_dim=8, windows=(None,)))
    sids = [world.start(tokens(13, number), 9, expect=15) for number in range(12)]
    for step in range(2):
        world.step({sid: [sid + step] for sid in reversed(sids)})


@promise("X", "X03", "C02")
def query_heads_map_to_their_own_kv_head(subject: Subject) -> None:
    """V of KV head h is h everywhere, so query head a answers a // (Hq / Hkv)."""
    for heads in (*HEADS, (28, 4), (5, 1)):
        geometry = subject.geometry(heads=heads, head_dim=8, windows=(None, None))
        world = World(subject, geometry, feed=_HeadFeed(geometry))
        out = world.feed_on(world.open(expect=6), tokens(6), 4)[0]
        group = geometry.query_heads // geometry.layers[0].kv_heads
        want = np.arange(geometry.query_heads) // group
        assert np.abs(out - want[None, :, None]).max() < 0.1, (
            f"heads {heads}: query heads read KV heads {np.rint(out[0, :, 0]).astype(int).tolist()}"
        )


@promise("X", "X05", "X08")
def head_dims_of_every_size_use_every_lane(subject: Subject) -> None:
    """head_dims on and off powers of two; in one run only the last lane of q and k is not zero."""
    for head_dim in sorted({*HEAD_DIMS, 40, 64, 96}):
        geometry = subject.geometry(heads=(4, 1), head_dim=head_dim, windows=(None,))
        for feed in (RandomFeed(geometry, subject.seed), _LastLaneFeed(RandomFeed(geometry, subject.seed))):
            world = World(subject, geometry, feed=feed)
            world.feed_on(world.open(expect=12), tokens(9), 4)


@promise("X", "X08")
def input_strides_do_not_matter(subject: Subject) -> None:
    """q, k, v as slices of one fused tensor, as transposed views and as copies give the same bits, and are not written to."""
    geometry = subject.geometry(heads=(6, 3), head_dim=24)
    results = [_views_run(subject, geometry, view) for view in (_contiguous, _fused, _transposed)]
    for name, other in (("slices of a fused tensor", results[1]), ("transposed views", results[2])):
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True)), f"{name} give another answer than copies"


@promise("X", "X06", "D04")
def page_size_does_not_matter(subject: Subject) -> None:
    """Pages of 1, 2, 3, 4, 8, 16 and 32 tokens over 37 tokens: the same outputs."""
    geometry = subject.geometry(head_dim=8)
    answers = {}
    for page_size in (1, 2, 3, 4, 8, 16, 32):
        world = World(subject.varied({"page_size": page_size}), geometry)
        sid = world.open(expect=37)
        answers[page_size] = world.feed_on(sid, tokens(37), 9)
    for page_size, answer in answers.items():
        worst = max(np.abs(a - b).max() for a, b in zip(answers[16], answer, strict=True))
        assert worst < 1e-9, f"pages of {page_size} move an output by {worst:.3g}"


@promise("X", "Q05", "X01")
def layers_of_different_shapes_keep_apart(subject: Subject) -> None:
    """Layers whose head_dims differ, in one cache: each with strides of its own."""
    geometry = subject.geometry(heads=(4, 1), head_dim=16, windows=(None, 6, None))
    layers = tuple(replace(layer, head_dim=dim) for layer, dim in zip(geometry.layers, (8, 16, 24), strict=True))
    geometry = subject.accepted(replace(geometry, layers=layers))
    world = World(subject, geometry)
    first, second = world.start(tokens(9), 4, expect=14), world.start(tokens(6, 1), 5, expect=14)
    for step in range(4):
        world.step({second: [step], first: [step + 1]})


@dataclass(frozen=True)
class _HeadFeed:
    """K = 0 and V of KV head h is h."""

    geometry: Geometry

    def rows(self, layer: int, tokens: Sequence[int], start: int, stop: int) -> Rows:
        shape, count = self.geometry.layers[layer], stop - start
        v = np.broadcast_to(np.arange(shape.kv_heads, dtype=float)[None, :, None], (count, shape.kv_heads, shape.head_dim)).copy()
        return np.ones((count, self.geometry.query_heads, shape.head_dim)), np.zeros_like(v), v


@dataclass(frozen=True)
class _LastLaneFeed:
    """Only the last lane of q and k speaks."""

    base: RandomFeed

    def rows(self, layer: int, tokens: Sequence[int], start: int, stop: int) -> Rows:
        q, k, v = self.base.rows(layer, tokens, start, stop)
        for rows in (q, k):
            rows[..., :-1] = 0.0
            rows[..., -1] *= 10
        return q, k, v


def _views_run(subject: Subject, geometry: Geometry, view: object) -> list[np.ndarray]:
    world = World(subject, geometry, shadowed=False)
    sid, outputs = world.open(expect=10), []
    for news in (tokens(7), [1], [2, 3]):
        plan = world.plan({sid: news})
        for layer in range(len(geometry.layers)):
            parts = view(*world.packed(layer, plan, {sid: news}))
            before = [part.clone() for part in parts]
            outputs.append(world.cache.attend(layer, *parts, plan).numpy().copy()[-len(news) :])
            assert all(torch.equal(a, b) for a, b in zip(before, parts, strict=True)), "attend wrote to its inputs"
        world.commit(plan, {sid: news})
    return outputs


def _contiguous(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q, k, v


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, kv_heads = q.shape[1], k.shape[1]
    fused = torch.cat((q, k, v), dim=1)
    return fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]


def _transposed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    return turned[0], turned[1], turned[2]
