"""Masks and live rows against the rule itself, position by position; refusals name what they refuse."""

from __future__ import annotations

from itertools import product

import pytest

from kernels.rows import Mask
from strategies.geometry import CacheFull, HeadSharing, Refused, Stats
from strategies.masks import combined_mask, live_union


def sees(mask: Mask, i: int, j: int) -> bool:
    return j <= i and (mask.window is None or i - j < mask.window or j < mask.sinks)


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), *product((1, 2, 5, 8), range(4))])
@pytest.mark.parametrize("model_window", [None, 1, 2, 5, 8])
def test_combined_mask_allows_what_both_rules_allow(model_window, window, sinks):
    both = {
        (i, j)
        for i, j in product(range(20), repeat=2)
        if j <= i and (model_window is None or i - j < model_window) and (window is None or i - j < window or j < sinks)
    }
    try:
        mask = combined_mask(model_window, window, sinks)
    except Refused as refusal:
        assert sinks and model_window > window
        assert str(window) in str(refusal) and str(sinks) in str(refusal) and str(model_window) in str(refusal)
        return
    assert {(i, j) for i, j in product(range(20), repeat=2) if sees(mask, i, j)} == both


@pytest.mark.parametrize("mask", [Mask(), Mask(1), Mask(3), Mask(6), Mask(1, 1), Mask(3, 2), Mask(3, 7)], ids=str)
def test_live_union_counts_rows_that_some_later_query_may_read(mask):
    for lengths in product(range(0, 12, 1), range(0, 12, 2), range(0, 12, 5)):
        live = {j for length in lengths for j in range(length) if any(sees(mask, i, j) for i in range(length, length + 12))}
        assert live_union(mask, lengths) == len(live), lengths


@pytest.mark.parametrize("mask", [Mask(), Mask(1), Mask(4), Mask(4, 2)], ids=str)
def test_first_visible_is_the_lowest_key_that_is_no_sink(mask):
    for i in range(15):
        assert mask.first_visible(i) == min(j for j in range(i + 1) if mask.window is None or i - j < mask.window)


def test_waste_is_none_while_nothing_is_in_use():
    assert Stats(100, 0, 0, 0).waste is None
    assert Stats(100, 80, 60, 0).waste == 0.25


def test_cache_full_says_how_short_and_for_whom():
    full = CacheFull(96, (3, 5))
    assert (full.short_bytes, full.sids) == (96, (3, 5))
    assert "96 bytes short" in str(full) and "[3, 5]" in str(full)


@pytest.mark.parametrize(("kv_heads", "init", "message"), [(0, "mean", "kv_heads=0"), (2, "median", "init='median'.*mean, first, random")])
def test_bad_head_sharing_is_refused_by_name(kv_heads, init, message):
    with pytest.raises(ValueError, match=message):
        HeadSharing(kv_heads, init)
