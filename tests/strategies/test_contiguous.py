"""Contiguous runs: what each slab reserves, forks, moves and their undoing, a budget that is kept, and fragmentation."""

from __future__ import annotations

import random

import pytest

from kernels.backend import resolve
from strategies.contiguous import Contiguous
from strategies.geometry import CacheFull, Geometry, LayerShape, Refused
from tests.strategies.driving import Driver, fresh_fits, nbytes, ops, shape

ROW = 2 * 4 * 8  # K and V of one float64 token of `shape()`
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def contiguous(rows: int | None = None, slab: str = "exact", context: int = 64) -> Contiguous:
    """With room for `rows` tokens, or without a budget."""
    return Contiguous(shape(context=context), None if rows is None else rows * ROW, ops(), slab=slab)


def row_bytes(codec: str, head_dim: int, dtype: str) -> int:
    """One head's row, from the formats' description."""
    groups = (head_dim + 31) // 32
    return {
        "raw": head_dim * WIDTHS[dtype],
        "int8": head_dim + 4,
        "q8_0": head_dim + 2 * groups,
        "q4_0": (head_dim + 1) // 2 + 2 * groups,
        "fp8": head_dim,
    }[codec]


def power_of_two(length: int, context: int) -> int:
    rows = max(16, 1 << (length - 1).bit_length())
    return min(rows, context)


SLAB_ROWS = {
    "max": lambda length, context: context,
    "exact": lambda length, context: length,
    "pow2": power_of_two,
    "growth": power_of_two,
}


@pytest.mark.parametrize("codecs", [("raw", "raw"), ("int8", "q4_0"), ("q8_0", "fp8")], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("slab", SLAB_ROWS)
def test_predicted_and_held_bytes_follow_the_closed_form_of_each_slab(slab, dtype, codecs):
    layers = (LayerShape(2, 24), LayerShape(3, 40, window=5))
    geometry = Geometry(layers, 6, 0.2, None, dtype, "cpu", 100)
    row = sum(layer.kv_heads * row_bytes(codec, layer.head_dim, dtype) for layer in layers for codec in codecs)
    for lengths, chunk in (([1], 1), ([16, 17, 33], 40), ([15, 100, 64], 9), ([5] * 4, 2)):
        cache = Contiguous(geometry, None, resolve("reference"), slab=slab, codec_k=codecs[0], codec_v=codecs[1])
        want = row * sum(SLAB_ROWS[slab](length, 100) for length in lengths)
        assert cache.bytes_for(lengths, chunk) == want and nbytes(cache) == 0
        sids = {cache.open(expect=length): length for length in lengths}
        for at in range(0, max(lengths), chunk):
            stops = {sid: min(at + chunk, length) for sid, length in sids.items() if at < length}
            plan = cache.plan(stops)
            cache.commit(plan, [0] * len(plan.positions))
        assert nbytes(cache) == cache.stats().reserved_bytes == want


def test_growing_slab_doubles_and_the_others_stay():
    held = {slab: [] for slab in SLAB_ROWS}
    for slab, rows in held.items():
        cache = contiguous(slab=slab)
        sid = cache.open(expect=50)
        for length in range(1, 51):
            cache.commit(cache.plan({sid: length}), [0])
            rows.append(nbytes(cache) // ROW)
    assert held["growth"] == [16] * 16 + [32] * 16 + [64] * 18
    assert (held["exact"], held["pow2"], held["max"]) == ([50] * 50, [64] * 50, [64] * 50)


def test_sequence_that_passes_what_it_expected_is_moved_and_keeps_its_rows():
    driver = Driver(contiguous())
    sid, quiet = driver.start([1, 2, 3], expect=3), driver.start([9] * 5, expect=7)
    driver.feed(sid, [4, 5, 6, 7], 1)
    driver.look()
    assert nbytes(driver.cache) == (8 + 7) * ROW  # `look` asked for one row more
    driver.step({quiet: [8, 8]})
    assert nbytes(driver.cache) == (8 + 7) * ROW


def test_expecting_more_than_the_context_gets_the_context():
    driver = Driver(contiguous(slab="exact", context=20))
    driver.start([1], expect=10**9)
    assert nbytes(driver.cache) == 20 * ROW


def test_addresses_stay_while_nothing_needs_to_move():
    driver = Driver(contiguous())
    sid, other = driver.open(expect=16), driver.open(expect=4)
    driver.step({sid: [1] * 8, other: [2]})
    before = [(tensor.data_ptr(), tensor.shape) for tensor in driver.cache.tensors()]
    driver.truncate(sid, 5)
    driver.step({sid: [3] * 4})
    driver.abort_after({sid: [4] * 7, other: [5]})
    driver.step({other: [1, 1, 1], sid: [6]})
    driver.close(other)
    driver.look()
    assert [(tensor.data_ptr(), tensor.shape) for tensor in driver.cache.tensors()] == before
    assert driver.cache.held(sid) == 10


def test_fork_takes_no_room_until_one_of_them_writes():
    driver = Driver(contiguous(rows=24))
    parent, room = driver.start([1, 2, 3, 4, 5], expect=8), driver.fits(8)
    children = [driver.fork(parent) for _ in range(5)]
    assert driver.fits(8) == room == 2
    driver.step({children[0]: [9]})
    assert driver.fits(8) == 1
    driver.look()
    driver.step({parent: [7]})
    assert driver.fits(8) == 0
    driver.close(*children[1:])
    assert driver.fits(8) == 1
    driver.look()
    driver.close()
    assert driver.fits(8) == 3


def test_last_sharer_writes_in_place():
    driver = Driver(contiguous(rows=16))
    parent = driver.start([1, 2, 3], expect=8)
    child = driver.fork(parent)
    driver.step({child: [9]})
    assert driver.fits(1) == 0
    driver.step({parent: [8]})
    driver.close(child)
    driver.step({parent: [7]})
    assert driver.fits(8) == 1


@pytest.mark.parametrize("rows", [None, 64], ids=["rebuilt", "moved"])
@pytest.mark.parametrize("bystander", [False, True], ids=["alone", "bystander"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["longer first", "shorter first"])
def test_abort_brings_back_a_run_that_two_movers_shared_at_different_lengths(rows, bystander, order):
    driver = Driver(contiguous(rows))
    longer = driver.start([1, 2, 3, 4, 5, 6], expect=7)
    shorter = driver.fork(longer)
    driver.truncate(shorter, 2)
    other = driver.start([30, 31, 32])
    if bystander:
        driver.truncate(driver.fork(longer), 4)
    pair = [longer, shorter]
    news = {pair[which]: [40 + which] * (3 + which) for which in order}
    for _ in range(2):
        driver.abort_after(news)
        driver.look()
    driver.step({other: [33] * 9})
    driver.look()
    driver.step(news)
    driver.look()
    driver.close()
    if rows is not None:
        assert driver.fits(8) == rows // 8


def test_closing_a_sharer_while_a_plan_is_open_keeps_the_rows_that_an_abort_needs():
    driver = Driver(contiguous(rows=32))
    writer = driver.start([1, 2, 3, 4], expect=8)
    sharer = driver.fork(writer)
    plan = driver.plan({writer: [9]})
    driver.run(plan, {writer: [9]})
    driver.close(sharer)
    driver.cache.abort(plan)
    for number in range(3):
        driver.start([20 + number] * 8)
    driver.look_at(writer)
    driver.close()
    assert driver.fits(8) == 4


def test_closing_a_sharer_while_a_plan_is_open_frees_its_run_at_commit():
    driver = Driver(contiguous(rows=32))
    writer = driver.start([1, 2, 3, 4], expect=8)
    sharer = driver.fork(writer)
    plan = driver.plan({writer: [9]})
    driver.run(plan, {writer: [9]})
    driver.close(sharer)
    driver.commit(plan, {writer: [9]})
    assert driver.fits(8) == 3


def test_full_plan_changes_nothing():
    driver = Driver(contiguous(rows=20))
    a, b = driver.start([1, 2, 3, 4], expect=6), driver.start([5, 6, 7, 8, 9], expect=5)
    before = driver.cache.stats(), [(tensor.data_ptr(), bytes(tensor.numpy())) for tensor in driver.cache.tensors()]
    c = driver.open(expect=12)
    with pytest.raises(CacheFull) as full:
        driver.plan({a: [1], c: [1], b: [2]})
    assert full.value.short_bytes == (12 - 8) * ROW and set(full.value.sids) == {b, c}
    after = driver.cache.stats(), [(tensor.data_ptr(), bytes(tensor.numpy())) for tensor in driver.cache.tensors()]
    assert before == after and [driver.cache.held(sid) for sid in (a, b, c)] == [4, 5, 0]
    driver.look_at(a)
    driver.close(c)
    assert driver.fits(9) == 1


def test_bytes_that_were_short_are_enough_once_they_are_free_in_one_piece():
    driver = Driver(contiguous(rows=20))
    last, _ = driver.start([1] * 6), driver.start([2] * 8)
    big = driver.open(expect=12)
    with pytest.raises(CacheFull) as full:
        driver.step({big: [3]})
    assert full.value.short_bytes == 6 * ROW
    driver.close(last)
    with pytest.raises(CacheFull):
        driver.step({big: [3]})
    driver.close(1)
    driver.step({big: [3]})


def test_room_in_pieces_is_refused_until_the_pieces_meet():
    driver = Driver(contiguous(rows=24))
    sids = [driver.start([number] * 4) for number in range(6)]
    driver.close(*sids[::2])
    wide = driver.open(expect=8)
    with pytest.raises(CacheFull) as full:
        driver.step({wide: [1] * 8})
    assert full.value.short_bytes == 4 * ROW, "12 rows are free, the longest run of them is 4"
    driver.close(sids[1])
    driver.step({wide: [1] * 7})
    driver.look_at(wide)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_movers_are_placed_whatever_order_they_are_planned_in(order):
    driver = Driver(contiguous(rows=11))
    left, middle, right = driver.start([1] * 6), driver.start([2]), driver.start([3] * 4)
    small = driver.fork(middle)  # it has a history, and wants 4 rows
    large = driver.open(expect=6)
    driver.close(left, right)
    news = [(small, [5] * 3), (large, [6] * 6)]
    driver.step(dict(news[which] for which in order))
    assert driver.fits(1) == 0
    driver.close(middle, small, large)
    assert driver.fits(11) == 1


@pytest.mark.parametrize("slab", SLAB_ROWS)
def test_capacity_comes_back_after_a_random_life(slab):
    def make() -> Contiguous:
        return contiguous(rows=150, slab=slab, context=40)

    rng = random.Random(slab)
    driver, refused = Driver(make()), 0
    for _ in range(80):
        sids = list(driver.logs)
        act = rng.choice(("open", "step", "step", "abort", "fork", "cut", "close"))
        if act == "open" or not sids:
            driver.open(expect=rng.choice((None, 5, 20)))
        elif act in ("step", "abort"):
            news = {sid: [rng.randint(1, 50)] * rng.randint(1, 6) for sid in rng.sample(sids, min(2, len(sids)))}
            news = {sid: new[: 40 - len(driver.logs[sid])] for sid, new in news.items() if len(driver.logs[sid]) < 40}
            try:
                plan = driver.plan(news) if news else None
            except CacheFull:
                refused += 1
                driver.close(sids[0])
                continue
            if plan is not None:
                driver.run(plan, news)
                driver.commit(plan, news) if act == "step" else driver.cache.abort(plan)
        elif act == "fork":
            driver.fork(rng.choice(sids))
        elif act == "cut":
            sid = rng.choice(sids)
            driver.truncate(sid, rng.randint(0, len(driver.logs[sid])))
        else:
            driver.close(rng.choice(sids))
    assert refused, "the budget never mattered"
    driver.close()
    assert driver.fits(9) == fresh_fits(make, 9) and driver.fits(40) == fresh_fits(make, 40)


def test_in_use_and_live_bytes_count_shared_rows_once():
    driver = Driver(contiguous())
    parent = driver.start([1, 2, 3, 4, 5], expect=8)
    child = driver.fork(parent)
    driver.truncate(child, 2)
    stats = driver.cache.stats()
    assert (stats.in_use_bytes, stats.live_bytes, stats.cached_bytes) == (8 * ROW, 5 * ROW, 0)
    driver.step({child: [9]})
    stats = driver.cache.stats()
    assert (stats.in_use_bytes, stats.live_bytes) == (16 * ROW, 8 * ROW)
    driver.close()
    assert (driver.cache.stats().in_use_bytes, driver.cache.stats().live_bytes) == (0, 0)


def test_bad_slab_and_hopeless_budget_are_refused_by_name():
    with pytest.raises(Refused, match="slab='huge'.*max, pow2, exact, growth"):
        contiguous(slab="huge")
    with pytest.raises(Refused, match=f"63 bytes holds no token: one token takes {ROW} bytes"):
        Contiguous(shape(), ROW - 1, ops())
