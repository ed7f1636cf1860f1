"""One cache under observation: every operation goes through here, and every promise that can be checked at once is.

Histories are token ids kept here, rows come from a feed, answers are compared by the shadow. It does not know what any
operation is meant to prove; the chapters and the random life do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from harness.conformance.poison import PoisonOps
from harness.conformance.promise import NotApplicable
from harness.conformance.shadow import ShadowCache
from harness.conformance.subject import Subject
from harness.conformance.toy import ProbeFeed, RandomFeed
from strategies.base import Plan
from strategies.geometry import CacheFull, Geometry

Outputs = dict[int, list[np.ndarray]]  # sid -> for each layer [t, Hq, D] float64, the rows of its new tokens


class World:
    """A fresh cache of `subject`, its memory poisoned, and the history that each of its sequences should have."""

    def __init__(
        self,
        subject: Subject,
        geometry: Geometry,
        budget: int | None = None,
        feed: RandomFeed | ProbeFeed | None = None,
        fill: float = float("nan"),
        shadowed: bool = True,
    ) -> None:
        self.geometry = geometry
        self.feed = RandomFeed(geometry, subject.seed) if feed is None else feed
        self.ops = PoisonOps(subject.ops, fill)
        self.raw = subject.make(geometry, budget, self.ops)
        self.cache = ShadowCache(self.raw) if shadowed else self.raw
        self.logs: dict[int, list[int]] = {}
        self.budget = budget
        self.whole = True  # False from a plan to its end, and for ever after a failed check

    def open(self, prompt: Sequence[int] = (), expect: int | None = None) -> int:
        sid = self.cache.open(prompt, expect)
        assert sid not in self.logs, f"sequence id {sid} was handed out twice"
        held = self.cache.held(sid)
        assert held == 0 or held < len(prompt), f"{held} of {len(prompt)} prompt tokens were adopted: at least one must be fed"
        self.logs[sid] = list(prompt[:held])
        return sid

    def start(self, tokens: Sequence[int], chunk: int | None = None, expect: int | None = None) -> int:
        """Open a sequence and feed it `tokens`, `chunk` at a time (all at once when None), skipping what was adopted."""
        sid = self.open(tokens, expect)
        self.feed_on(sid, tokens[len(self.logs[sid]) :], chunk)
        return sid

    def feed_on(self, sid: int, tokens: Sequence[int], chunk: int | None = None) -> list[np.ndarray]:
        """Feed more tokens to one sequence; returns each layer's outputs for them, joined."""
        size = len(tokens) if chunk is None else chunk
        parts = [self.step({sid: tokens[at : at + size]})[sid] for at in range(0, len(tokens), size)]
        return [np.concatenate(layer) for layer in zip(*parts, strict=True)]

    def step(self, news: Mapping[int, Sequence[int]]) -> Outputs:
        """One whole step: plan, every layer, commit."""
        plan = self.plan(news)
        outputs = self.run(plan, news)
        self.commit(plan, news)
        return outputs

    def plan(self, news: Mapping[int, Sequence[int]], pad_to: int | None = None) -> Plan:
        """Plan to append `news`; what the plan says is checked against the histories."""
        held = {sid: self.cache.held(sid) for sid in news}
        stops = {sid: len(self.logs[sid]) + len(new) for sid, new in news.items()}
        plan = self.cache.plan(stops, pad_to)
        self.whole = False
        want = tuple((sid, held[sid], len(self.logs[sid]) + len(new)) for sid, new in news.items())
        assert plan.spans == want, f"the plan's spans are {plan.spans}, they should be {want}"
        pads = 0 if pad_to is None else pad_to - len(want)
        positions = [position for _, start, stop in want for position in range(start, stop)] + [0] * pads
        assert plan.positions.tolist() == positions, f"positions {plan.positions.tolist()} should be {positions}"
        ends = np.cumsum([0] + [stop - start for _, start, stop in want] + [1] * pads).tolist()
        assert plan.cu_seqlens.tolist() == ends, f"cu_seqlens {plan.cu_seqlens.tolist()} should be {ends}"
        assert plan.logit_rows.tolist() == [end - 1 for end in ends[1:]], f"logit_rows {plan.logit_rows.tolist()} should end each span"
        return plan

    def run(self, plan: Plan, news: Mapping[int, Sequence[int]], layers: int | None = None) -> Outputs:
        """Attend through the first `layers` layers (all when None); returns the outputs of the new tokens."""
        outputs: Outputs = {sid: [] for sid in news}
        for layer in range(len(self.geometry.layers) if layers is None else layers):
            out = self.cache.attend(layer, *self.packed(layer, plan, news), plan).to(torch.float64).numpy()
            assert out.shape == (int(plan.cu_seqlens[-1]), self.geometry.query_heads, self.geometry.layers[layer].head_dim), (
                f"output of shape {out.shape}"
            )
            for (sid, _, _), end in zip(plan.spans, plan.cu_seqlens.tolist()[1 : len(plan.spans) + 1], strict=True):
                outputs[sid].append(out[end - len(news[sid]) : end])
        self.check()
        return outputs

    def commit(self, plan: Plan, news: Mapping[int, Sequence[int]]) -> None:
        """End the step; the histories grow by `news`."""
        logs = {sid: [*self.logs[sid], *new] for sid, new in news.items()}
        self.cache.commit(plan, [token for sid, start, stop in plan.spans for token in logs[sid][start:stop]])
        self.logs |= logs
        self.check()
        self.whole = True

    def abort(self, plan: Plan) -> None:
        self.cache.abort(plan)
        self.check()
        self.whole = True

    def fork(self, sid: int) -> int:
        child = self.cache.fork(sid)
        assert child not in self.logs, f"sequence id {child} was handed out twice"
        self.logs[child] = list(self.logs[sid])
        self.check()
        return child

    def truncate(self, sid: int, length: int) -> None:
        self.cache.truncate(sid, length)
        del self.logs[sid][length:]
        self.check()

    def close(self, sid: int) -> None:
        self.cache.close(sid)
        del self.logs[sid]
        self.check()

    def close_all(self) -> None:
        for sid in list(self.logs):
            self.close(sid)

    def capacity(self, length: int, most: int = 40) -> int:
        """How many new sequences of `length` tokens fit beside the living, found by filling the cache; they are closed again."""
        opened: list[int] = []
        fitting = 0
        while fitting < most:
            opened.append(self.open(expect=length))
            try:
                plan = self.plan({opened[-1]: tokens(length, fitting)})
            except CacheFull:
                break
            self.run(plan, {opened[-1]: tokens(length, fitting)})
            self.commit(plan, {opened[-1]: tokens(length, fitting)})
            fitting += 1
        for sid in opened:
            self.close(sid)
        if fitting < most:
            return fitting
        raise NotApplicable(f"takes more than {most} sequences of {length} tokens in {self.budget} bytes")

    def check(self) -> None:
        """Everything that holds between any two calls."""
        was, self.whole = self.whole, False
        self._check()
        self.whole = was

    def _check(self) -> None:
        failure = getattr(self.cache, "failure", None)
        assert failure is None, failure.sentence
        for sid, log in self.logs.items():
            held = self.cache.held(sid)
            assert 0 <= held <= len(log), f"sequence {sid} has {len(log)} tokens, it claims to hold {held}"
        stats = self.cache.stats()
        assert 0 <= stats.live_bytes <= stats.in_use_bytes <= stats.reserved_bytes, f"bytes out of order: {stats}"
        assert stats.in_use_bytes + stats.cached_bytes <= stats.reserved_bytes, f"more bytes in use or cached than reserved: {stats}"
        held = sum(tensor.numel() * tensor.element_size() for tensor in self.cache.tensors())
        assert held == stats.reserved_bytes, f"reserved {stats.reserved_bytes} bytes are reported, the tensors hold {held}"
        assert self.budget is None or held <= self.budget, f"{held} bytes are held, the budget is {self.budget}"

    def packed(self, layer: int, plan: Plan, news: Mapping[int, Sequence[int]]) -> list[torch.Tensor]:
        """q, k and v of the step's tokens; those of pads are any numbers, another token's here."""
        spans = [self.feed.rows(layer, [*self.logs[sid], *news[sid]], start, stop) for sid, start, stop in plan.spans]
        spans += [self.feed.rows(layer, [pad], 0, 1) for pad in range(plan.batch.pads)]
        dtype = getattr(torch, self.geometry.dtype)
        return [torch.from_numpy(np.concatenate(parts)).to(dtype) for parts in zip(*spans, strict=True)]


def budget_for(subject: Subject, geometry: Geometry, count: int, length: int) -> int | None:
    """The smallest budget tried in which one plan holds `count` sequences of `length` tokens; None when nothing is stored."""
    budget = subject.make(geometry, None, subject.ops).bytes_for([length] * count, length)
    for _ in range(12 if budget else 0):
        cache = subject.make(geometry, budget, subject.ops)
        try:
            cache.plan({cache.open(expect=length): length for _ in range(count)})
        except CacheFull:
            budget += max(1, budget // 4)
            continue
        return budget
    return None


def tokens(count: int, number: int = 0) -> list[int]:
    """`count` token ids of prompt `number`: different prompts share no id, up to nine of them."""
    return [10 * (number % 9) + (7 * i + i // 10) % 10 for i in range(count)]


def probe(subject: Subject, geometry: Geometry, chunks: Sequence[int]) -> list[list[set[int]]]:
    """For each layer, the set of positions that each query attends, read off with the attended-set probe; weights must be 1/n."""
    length, width = sum(chunks), min(layer.head_dim for layer in geometry.layers)
    sets: list[list[set[int]]] = [[set() for _ in range(length)] for _ in geometry.layers]
    totals = np.zeros((len(geometry.layers), length))
    for first in range(0, length, width):
        world = World(subject, geometry, feed=ProbeFeed(geometry, first), shadowed=False)
        sid, at = world.open(expect=length), 0
        for chunk in chunks:
            outputs = world.step({sid: [1] * chunk})[sid]
            for layer, out in enumerate(outputs):
                for row in range(chunk):
                    weights = out[row].min(0)  # [D]; every head must see the position
                    assert np.abs(out[row] - weights).max() < 1e-6, f"layer {layer}, query {at + row}: heads attend different sets"
                    sets[layer][at + row] |= {first + int(lane) for lane in np.nonzero(weights > 1e-6)[0]}
                    totals[layer, at + row] += weights.sum()
            at += chunk
    assert np.abs(totals - 1).max() < 2e-3, f"the weights of some query add up to {totals.flat[np.abs(totals - 1).argmax()]:.6f}"
    return sets


def allowed(position: int, window: int | None, sinks: int) -> set[int]:
    """The rule, as a set: j <= i and (i - j < window or j < sinks)."""
    return {j for j in range(position + 1) if window is None or position - j < window or j < sinks}
