"""Paged bytes: predicted = reserved = held for many shapes of use, and several groups of layers under one budget."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels.backend import resolve
from strategies.geometry import CacheFull, Geometry, LayerShape
from strategies.paged import Paged
from tests.strategies.driving import Driver, fresh_fits, nbytes, ops, shape

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PAGE = 4 * 2 * 4 * 8  # four tokens of K and V in one float64 layer of `shape()`


def two_lanes(pages: int, **parameters: object) -> Paged:
    """A full and a windowed lane of one layer each, with a budget for about `pages` pages each."""
    return Paged(shape((None, 5)), 2 * pages * PAGE, ops(), page_size=4, **parameters)


def feed(cache: Paged, lengths: list[int], chunk: int) -> int:
    """Grow sequences together, `chunk` tokens a step, without computing anything -> the most bytes in use while a plan was open."""
    sids = [cache.open(expect=length) for length in lengths]
    most = 0
    for at in range(0, max(lengths), chunk):
        plan = cache.plan({sid: min(at + chunk, length) for sid, length in zip(sids, lengths, strict=True) if at < length})
        most = max(most, cache.stats().in_use_bytes)
        cache.commit(plan, range(len(plan.positions)))
    return most


USES = (([1], 1), ([9], 9), ([17, 5, 8], 17), ([12, 50], 4), ([3] * 7, 2), ([60, 1], 60))


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (1, 0), (6, 0), (6, 5)])
@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_predicted_bytes_are_the_bytes_held(page_size, window, sinks, slack):
    for lengths, chunk in USES:
        cache = Paged(shape(dtype="float16"), None, resolve("reference"), page_size=page_size, window=window, sinks=sinks, slack=slack)
        predicted = cache.bytes_for(lengths, chunk)
        most = feed(cache, lengths, chunk)
        assert nbytes(cache) == cache.stats().reserved_bytes == predicted
        spare = (len(lengths) * 2 + 1) * page_size * 2 * 4 * 2  # the scratch page, and where spans begin inside pages
        assert predicted - spare <= most <= predicted


@pytest.mark.parametrize("codecs", [("raw", "raw"), ("int8", "q4_0"), ("q8_0", "fp8")], ids=str)
@pytest.mark.parametrize("dtype", WIDTHS)
def test_bytes_follow_the_formats_in_every_dtype(dtype, codecs):
    layers = (LayerShape(2, 24), LayerShape(3, 40, window=5), LayerShape(1, 24))
    geometry = Geometry(layers, 6, 0.2, None, dtype, "cpu", 64)

    def row(codec: str, head_dim: int) -> int:
        groups = (head_dim + 31) // 32
        by_name = {"raw": head_dim * WIDTHS[dtype], "int8": head_dim + 4, "q8_0": head_dim + 2 * groups}
        return (by_name | {"q4_0": head_dim // 2 + 2 * groups, "fp8": head_dim})[codec]

    token = [layer.kv_heads * sum(row(codec, layer.head_dim) for codec in codecs) for layer in layers]
    for lengths, chunk in USES:
        cache = Paged(geometry, None, resolve("reference"), page_size=4, codec_k=codecs[0], codec_v=codecs[1])
        feed(cache, lengths, chunk)
        full = 1 + sum(-(-length // 4) for length in lengths)
        # of a window of 5, as many pages as 4 + chunk rows can touch
        slid = 1 + sum(min(-(-length // 4), -(-(4 + min(chunk, length) - 1) // 4) + 1) for length in lengths)
        want = 4 * (full * (token[0] + token[2]) + slid * token[1])
        assert nbytes(cache) == cache.bytes_for(lengths, chunk) == want
        assert cache.bytes_per_token() == sum(token)


def test_asking_for_a_prediction_changes_nothing():
    cache = Paged(shape((None, 5)), 50 * PAGE, resolve("reference"), page_size=4)
    before = cache.stats(), [tensor.data_ptr() for tensor in cache.tensors()]
    assert cache.bytes_for([10**6, 3], 10**5) > cache.bytes_for([3, 9]) > cache.bytes_for([]) > 0
    assert (cache.stats(), [tensor.data_ptr() for tensor in cache.tensors()]) == before


@pytest.mark.parametrize("windows", [(None, 5), (5, 9), (None, 3, 9, None)], ids=str)
def test_one_budget_serves_all_lanes_and_is_never_passed(windows):
    lanes = len(set(windows))
    for pages, page_size in product((lanes * 2, 9, 30, 101), (1, 4)):
        budget = pages * page_size * PAGE // 4 * len(windows) + 5
        cache = Paged(shape(windows, context=32), budget, resolve("reference"), page_size=page_size)
        assert nbytes(cache) == cache.stats().reserved_bytes <= budget
        sizes = [lane.pool.capacity for lane in cache._lanes]
        assert all(sizes)


def test_lanes_refuse_together_and_count_every_shortage():
    driver = Driver(two_lanes(9))
    a, b = driver.start([1] * 16, 4), driver.start([2] * 6)
    before = [lane.pool.available for lane in driver.cache._lanes], [tensor.data_ptr() for tensor in driver.cache.tensors()]
    with pytest.raises(CacheFull) as full:
        driver.plan({b: [3] * 40})
    # a: four pages in one lane, the last of them in the other; b: twelve in each; and two scratch pages
    assert full.value.short_bytes == (4 + 1 + 12 + 12 + 2 - 18) * PAGE and full.value.sids == (b,)
    assert ([lane.pool.available for lane in driver.cache._lanes], [tensor.data_ptr() for tensor in driver.cache.tensors()]) == before
    driver.look()
    driver.close(a, b)
    assert driver.fits(4) == fresh_fits(lambda: two_lanes(9), 4)


def test_layers_with_one_mask_share_a_lane_and_a_window_above_the_models_changes_nothing():
    cache = Paged(shape((None, 5, None, 7)), None, resolve("reference"), window=6)
    assert [cache._lane_of[layer] for layer in range(4)] == [0, 1, 0, 0]
    assert [cache.mask(layer).window for layer in range(4)] == [6, 5, 6, 6]
    assert cache.rewind == 0


def test_live_bytes_count_what_a_later_query_may_read():
    for windows, sinks, window in (((None, 5), 0, None), ((None, None), 3, 4)):
        cache = Paged(shape(windows), None, resolve("reference"), page_size=4, window=window, sinks=sinks)
        feed(cache, [30, 7], 3)
        live = 0
        for layer in range(2):
            mask = cache.mask(layer)
            for length in (30, 7):
                live += sum(1 for j in range(length) if mask.window is None or length - j < mask.window or j < mask.sinks)
        assert cache.stats().live_bytes == live * PAGE // 4


def test_live_bytes_of_shared_pages_agree_with_a_set_of_rows():
    cache = Paged(shape((None, 6)), None, resolve("reference"), page_size=4)
    feed(cache, [18], 5)
    child = cache.fork(0)
    for sid, stop in ((0, 21), (child, 19)):
        cache.commit(cache.plan({sid: stop}), range(stop - 18))
    cache.truncate(child, 18)
    rows = 0
    for lane in cache._lanes:
        seen = set()
        for sid, length in ((0, 21), (child, 18)):
            first = lane.mask.first_visible(length)
            seen |= {(lane.tables.page(sid, j // 4), j % 4) for j in range(first, length)}
        rows += len(seen)
    assert cache.stats().live_bytes == rows * PAGE // 4


def test_failed_allocation_leaves_the_pool_as_large_as_its_memory(monkeypatch):
    cache = Paged(shape(), None, resolve("reference"), page_size=4)
    feed(cache, [6], 6)
    held = nbytes(cache)

    def no_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(cache.ops, "new_rows", no_memory, raising=False)
    with pytest.raises(torch.OutOfMemoryError):
        cache.plan({cache.open(expect=40): 30})
    monkeypatch.undo()
    assert nbytes(cache) == held == (1 + cache._lanes[0].pool.capacity) * PAGE
    cache.commit(cache.plan({1: 30}), range(30))
