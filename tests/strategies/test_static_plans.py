"""Plans that can be replayed: same tensors for equal keys, pads that touch nothing, and recorded calls that answer like fresh ones."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from harness.conformance.toy import geometry
from kernels.api import Ops
from kernels.backend import resolve
from kernels.rows import Batch, DenseRows
from strategies.base import KVCache, Plan
from strategies.contiguous import Contiguous
from strategies.geometry import Refused
from strategies.kivi import Kivi
from strategies.none import NoCache
from strategies.paged import Paged
from tests.interpreter import functions_patched_once

SHAPE = geometry((6, 3), 16, (None, 5), "float32", 1024)
CACHES = {
    "contiguous": (Contiguous, {}),
    "contiguous_q4": (Contiguous, {"codec_k": "q4_0", "codec_v": "q4_0"}),
    "paged": (Paged, {"page_size": 4}),
    "window_int8": (Paged, {"page_size": 4, "window": 7, "sinks": 2, "codec_k": "int8", "codec_v": "int8"}),
}
LENGTHS = (9, 4, 14)


class Recorder(Ops):
    """The ops of a backend; calls made while `recording` are kept and can be made again."""

    def __init__(self, inner: Ops) -> None:
        super().__init__(inner.name, inner._module)
        self.recording = False
        self.recorded: list[tuple[str, tuple]] = []

    def write_rows(self, *arguments):
        return self._call("write_rows", arguments)

    def attend_dense(self, *arguments):
        return self._call("attend_dense", arguments)

    def attend_paged(self, *arguments):
        return self._call("attend_paged", arguments)

    def _call(self, op: str, arguments: tuple):
        if self.recording:
            self.recorded.append((op, arguments))
        return getattr(super(), op)(*arguments)

    def replay(self, plan: Plan, host: bool) -> list[torch.Tensor]:
        """Make the recorded calls again -> the outputs of their attends. host: with the numbers that host kernels read up to date."""
        outs = []
        for op, arguments in self.recorded:
            outs.append(getattr(super(), op)(*([current(x, plan) for x in arguments] if host else arguments)))
        return [out for out in outs if out is not None]


def current(argument: Any, plan: Plan) -> Any:
    """`argument` with its copy of a plan's numbers on the host taken from `plan`; its tensors stay what they are."""
    if isinstance(argument, Batch):
        return replace(argument, spans=plan.batch.spans)
    if isinstance(argument, DenseRows):
        return replace(argument, host=plan.private.where.host)
    return argument


@pytest.fixture(params=CACHES)
def make(request):
    storage, parameters = CACHES[request.param]
    return lambda ops, budget=None: storage(SHAPE, budget, ops, **parameters)


def started(cache: KVCache, padded: bool = True) -> list[int]:
    """Sequences of LENGTHS, fed; the caller decodes them up to 40 tokens."""
    if padded:
        cache.reserve_scratch()
    sids = [cache.open(expect=40) for _ in LENGTHS]
    step(cache, cache.plan(dict(zip(sids, LENGTHS, strict=True))))
    return sids


def step(cache: KVCache, plan: Plan, rows: list | None = None) -> list[torch.Tensor]:
    """Attend through every layer with `rows` (random ones when None) and commit."""
    rows = random_rows(plan.batch.tokens, plan.batch.starts.sum().item()) if rows is None else rows
    answers = [cache.attend(layer, *qkv, plan) for layer, qkv in enumerate(rows)]
    cache.commit(plan, [0] * sum(stop - start for _, start, stop in plan.spans))
    return answers


def random_rows(tokens: int, seed: int) -> list[list[torch.Tensor]]:
    """q, k and v of each layer."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(tokens, heads, 16, generator=generator) for heads in (6, 3, 3)] for _ in SHAPE.layers]


def next_plan(cache: KVCache, sids: list[int], pad_to: int | None = None) -> Plan:
    return cache.plan({sid: cache.held(sid) + 1 for sid in sids}, pad_to)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in a plan, however deep."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_of(part)]
    if isinstance(value, dict):
        return tensors_of(tuple(value.values()))
    if is_dataclass(value):
        return [tensor for field in fields(value) for tensor in tensors_of(getattr(value, field.name))]
    return []


def test_plans_of_equal_key_have_their_tensors_at_equal_addresses(make):
    cache = make(resolve("reference"))
    sids = started(cache)
    seen: dict[tuple, list[int]] = {}
    for count in (2, 3, 2, 3, 2):
        plan = next_plan(cache, sids[:count], 4 if count == 3 else 2)
        addresses = [tensor.data_ptr() for tensor in tensors_of(plan)]
        assert len(addresses) >= 6 and len(set(addresses)) == len(addresses)
        assert seen.setdefault(plan.key, addresses) == addresses
        step(cache, plan)
    assert len(seen) == 2


def test_plans_that_are_not_padded_have_no_key_and_tensors_of_their_own(make):
    cache = make(resolve("reference"))
    sids = started(cache)
    first = next_plan(cache, sids)
    cache.abort(first)
    second = next_plan(cache, sids)
    assert first.key is None and second.key is None
    assert not {t.data_ptr() for t in tensors_of(first)} & {t.data_ptr() for t in tensors_of(second)}


def test_another_number_of_spans_another_bound_and_other_stores_make_another_key(make):
    cache = make(resolve("reference"))
    sids = started(cache)
    keys = []
    for pad_to in (3, 4):
        keys.append(next_plan(cache, sids, pad_to).key)
        cache.abort(cache._open_plan)
    long = cache.open(expect=300)
    step(cache, cache.plan({long: 260}))  # the stores have to grow for it
    keys.append(next_plan(cache, sids, 3).key)
    cache.abort(cache._open_plan)
    keys.append(next_plan(cache, [*sids[:2], long], 3).key)
    assert len(set(keys)) == 4


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_replayed_calls_answer_like_fresh_ones_to_the_bit(make, backend):
    """A device reads a plan's tensors and nothing else: the Triton kernels are replayed with every number on the host out of date."""
    with functions_patched_once():
        replays_like_fresh(make, backend)


def replays_like_fresh(make, backend: str) -> None:
    ops = Recorder(resolve(backend))
    replayed, fresh = make(ops), make(resolve(backend))
    sids, others = started(replayed), started(fresh, padded=False)
    static = random_rows(4, 1)
    for number in range(12):  # across pages, and out of the windows
        rows = random_rows(4, 100 + number)
        for held, new in zip(tensors_of(static), tensors_of(rows), strict=True):
            held.copy_(new)
        plan = next_plan(replayed, sids, 4)
        if number == 0:
            ops.recording, key = True, plan.key
            got = step(replayed, plan, static)
            ops.recording = False
        else:
            assert plan.key == key
            got = ops.replay(plan, host=backend != "triton")
            replayed.commit(plan, [0] * len(sids))
        want = step(fresh, next_plan(fresh, others), [[x[:3] for x in qkv] for qkv in rows])
        for layer, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a[:3], b), f"step {number}, layer {layer}"
    assert len(ops.recorded) == 3 * len(SHAPE.layers)


@pytest.mark.parametrize("pad_to", [3, 4, 16])
def test_pads_cost_what_is_billed_and_change_no_row_of_a_sequence(make, pad_to):
    """16: more pads than a page has rows; they share."""
    padded, plain = make(resolve("reference")), make(resolve("reference"))
    sids, others = started(padded), started(plain, padded=False)
    for _ in range(40 - max(LENGTHS)):
        plan = next_plan(padded, sids, pad_to)
        rows = random_rows(pad_to, 5 + plan.spans[0][1])
        got = step(padded, plan, rows)
        want = step(plain, next_plan(plain, others), [[x[:3] for x in qkv] for qkv in rows])
        assert all(torch.equal(a[:3], b) for a, b in zip(got, want, strict=True))
    held = sum(tensor.numel() * tensor.element_size() for tensor in padded.tensors())
    assert held == padded.stats().reserved_bytes == padded.bytes_for([40] * 3, max(LENGTHS))
    more = padded.bytes_for([40] * 3, max(LENGTHS)) - plain.bytes_for([40] * 3, max(LENGTHS))
    assert more == (padded.bytes_per_token() if isinstance(padded, Contiguous) else 0)


def test_with_a_budget_the_scratch_row_comes_out_of_it(make):
    cache = make(resolve("reference"))
    cache.reserve_scratch()
    budget = cache.bytes_for([40] * 3, 14)
    bounded = make(resolve("reference"), budget)
    sids = started(bounded)
    held = sum(tensor.numel() * tensor.element_size() for tensor in bounded.tensors())
    assert held == bounded.stats().reserved_bytes <= budget
    step(bounded, next_plan(bounded, sids, 4))


def test_a_budget_of_one_token_has_no_room_for_a_scratch_row():
    budget = int(Contiguous(SHAPE, None, resolve("reference")).bytes_per_token())
    cache = Contiguous(SHAPE, budget, resolve("reference"))
    with pytest.raises(Refused, match="one token and the scratch row takes"):
        cache.reserve_scratch()
    assert cache.bytes_for([1]) == budget
    step(cache, cache.plan({cache.open(): 1}))


def test_pads_never_address_a_row_that_a_sequence_may_own(make):
    cache = make(resolve("reference"))
    sids = started(cache)
    plan = next_plan(cache, sids, 8)
    slots = plan.private.slots if isinstance(plan.private.slots, tuple) else (plan.private.slots,)
    for lane in slots:
        own, pads = lane[:3].tolist(), lane[3:].tolist()
        assert min(pads) >= 0 and not set(own) & set(pads)
        if isinstance(cache, Contiguous):
            assert set(pads) == {cache._stores[0][0].count - 1}
        else:
            assert max(pads) < cache.page_size


def test_caches_that_cannot_be_replayed_say_so():
    for cache in (NoCache(SHAPE, None, resolve("reference")), Kivi(geometry(windows=(None,)), None, resolve("reference"))):
        assert not cache.capturable
        with pytest.raises(Refused, match="cannot be replayed from a captured graph"):
            cache.reserve_scratch()
        with pytest.raises(RuntimeError, match="only after reserve_scratch"):
            cache.plan({cache.open(): 1}, 2)


def test_padding_is_refused_without_scratch_rows_and_for_other_spans(make):
    cache = make(resolve("reference"))
    sid = cache.open()
    with pytest.raises(RuntimeError, match="only after reserve_scratch"):
        cache.plan({sid: 1}, 2)
    with pytest.raises(RuntimeError, match="before the first sequence"):
        cache.reserve_scratch()
    cache.close(sid)
    cache.reserve_scratch()
    a, b = cache.open(), cache.open()
    for stops, pad_to in (({a: 2}, 4), ({a: 1, b: 1}, 1)):
        with pytest.raises(ValueError, match="spans of one token each"):
            cache.plan(stops, pad_to)
    assert cache.stats().in_use_bytes == 0
