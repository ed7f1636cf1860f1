"""Attention in the interpreter against NumPy in float64: masks, layouts, codecs, heads, splits, poison and edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.rows import DenseRows, Mask, PagedRows
from tests.kernels.cases import NAMES, Case, batch_of
from tests.kernels.gpu import checks
from tests.kernels.gpu.checks import SPANS

MASKS = (Mask(), Mask(window=1), Mask(window=7), Mask(window=5, sinks=2), Mask(window=3, sinks=20))


def small(**_changes) -> Case:
    return Case(**({"head_dim": 24, "spans": SPANS} | _changes))


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_in_float64_is_exact(ops, mask, page_size):
    checks.attends_exactly(ops, small(mask=mask, page_size=page_size))


@pytest.mark.parametrize(
    ("codec_k", "codec_v"),
    [("int8", "int8"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("fp8", "fp8"), ("q8_0", "q4_0"), ("raw", "int8"), ("int8", "raw")],
)
def test_codecs_are_decoded_in_the_tile(ops, codec_k, codec_v):
    checks.attends_exactly(ops, small(codec_k=codec_k, codec_v=codec_v, head_dim=40, page_size=3))


@pytest.mark.parametrize("codec", ["raw", "int8", "q4_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=NAMES.get)
def test_low_precision_is_as_close_as_the_reference(ops, dtype, codec):
    checks.attends_as_closely_as_the_reference(ops, small(dtype=dtype, codec_k=codec, codec_v=codec, head_dim=64))


@pytest.mark.parametrize("head_dim", [8, 16, 80, 96, 128, 256])
@pytest.mark.parametrize("codec", ["raw", "q4_0"])
def test_any_head_dim_uses_every_lane_and_no_other(ops, head_dim, codec):
    checks.attends_exactly(ops, small(codec_k=codec, codec_v=codec, head_dim=head_dim, kv_heads=1, query_heads=2, spans=((2, 3), (17, 20))))


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(8, 2), (28, 4), (5, 1), (4, 4), (20, 1)])
def test_query_heads_share_kv_heads_in_order(ops, query_heads, kv_heads):
    checks.attends_exactly(ops, small(query_heads=query_heads, kv_heads=kv_heads, head_dim=8, spans=((1, 2), (3, 5))))


@pytest.mark.parametrize("splits", [2, 3, 9])
@pytest.mark.parametrize("mask", [Mask(), Mask(window=20, sinks=3)], ids=str)
def test_split_keys_merge_to_the_whole(ops, mask, splits):
    checks.attends_exactly(ops, small(mask=mask, spans=((0, 5), (40, 41), (1, 9)), query_heads=2, kv_heads=1), splits)


def test_split_attention_rounds_once_in_low_precision(ops, reference):
    from dataclasses import replace

    from tests.kernels.cases import assert_as_close_as_reference, step_of

    step = step_of(small(dtype=torch.bfloat16, codec_k="int8", codec_v="int8", query_heads=2, kv_heads=1), ops)
    split = replace(step, batch=replace(step.batch, splits=4))
    assert_as_close_as_reference(split.attend(ops), step.attend(reference), step.exact)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=NAMES.get)
def test_softcap_bends_scores(ops, dtype, softcap):
    if dtype == torch.float64:
        checks.attends_exactly(ops, small(softcap=softcap))
    else:
        checks.attends_as_closely_as_the_reference(ops, small(dtype=dtype, softcap=softcap))


@pytest.mark.parametrize("codec", ["raw", "int8", "q8_0", "q4_0"])
def test_memory_of_others_changes_no_bit(ops, codec):
    """N01: pages are cut by the length and by the window; what lies in their other rows is NaN, then 0, infinity and 65504."""
    changes = {"dtype": torch.float16, "codec_k": codec, "codec_v": codec, "page_size": 8, "query_heads": 2, "kv_heads": 1}
    checks.ignores_rows_it_does_not_own(ops, small(**changes, mask=Mask(window=5, sinks=2), spans=((2, 3), (37, 39))))
    checks.ignores_rows_it_does_not_own(ops, small(**changes, spans=((16, 17), (0, 3))))


@pytest.mark.parametrize("length", [1, 4, 5, 6, 17])
def test_a_window_counts_the_query_itself(ops, length):
    checks.weighs_exactly_the_visible_keys(ops, Mask(window=5), length)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=1), Mask(window=3, sinks=2), Mask(window=16)], ids=str)
def test_the_attended_set_is_the_visible_set(ops, mask):
    checks.weighs_exactly_the_visible_keys(ops, mask, 35)


def test_tiles_before_the_window_are_skipped(ops):
    checks.attends_exactly(ops, small(mask=Mask(window=4), spans=((90, 91), (47, 50))))


def test_sinks_are_read_across_skipped_tiles(ops):
    checks.attends_exactly(ops, small(mask=Mask(window=4, sinks=18), spans=((90, 91), (47, 50))))


def test_long_chunks_take_tall_tiles(ops):
    checks.attends_exactly(ops, small(query_heads=3, kv_heads=1, head_dim=16, spans=((0, 40), (7, 30))))


def test_packed_attention_reads_the_fused_projection_in_place(ops):
    checks.packs(ops, Mask())
    checks.packs(ops, Mask(window=4, sinks=1))


def test_every_page_size_gives_the_same_bits(ops):
    """X06: the tile plan does not depend on the page, so neither may a bit of the answer."""
    from tests.kernels.cases import step_of

    answers = []
    for page_size in (1, 2, 3, 8, 16, 32):
        case = small(dtype=torch.float32, codec_k="int8", codec_v="int8", page_size=page_size, spans=((36, 37),), query_heads=2, kv_heads=1)
        answers.append(step_of(case, ops).attend(ops))
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_scores_beyond_float16_do_not_overflow(ops):
    """N06: 128 products of 24 * 24 are more than float16 holds; the scaled score is not."""
    q = torch.full((1, 1, 128), 24.0, dtype=torch.float16)
    k = torch.zeros(2, 1, 128, dtype=torch.float16)
    k[0] = 24.0
    v = torch.stack((torch.full((1, 128), 3.0), torch.full((1, 128), -5.0))).to(torch.float16)
    keys, values = (ops.new_rows(_raw(), 2, 1, 128, torch.float16, "cpu", None) for _ in "kv")
    for store, rows in ((keys, k), (values, v)):
        ops.write_rows(store, torch.tensor([0, 1]), rows)
    out = ops.attend_dense(q, keys, values, DenseRows(torch.tensor([0]), (0,)), batch_of(((1, 2),)), Mask(), 128**-0.5, None)
    assert torch.equal(out, torch.full_like(q, 3.0))


@pytest.mark.parametrize("score", [6e4, -6e4])
def test_equal_extreme_scores_share_their_weight(ops, score):
    q = torch.full((1, 1, 16), score, dtype=torch.float64)
    k = torch.full((20, 1, 16), 1 / 16, dtype=torch.float64)
    v = torch.arange(20, dtype=torch.float64)[:, None, None].expand(20, 1, 16).contiguous()
    keys, values = (ops.new_rows(_raw(), 20, 1, 16, torch.float64, "cpu", None) for _ in "kv")
    for store, rows in ((keys, k), (values, v)):
        ops.write_rows(store, torch.arange(20), rows)
    out = ops.attend_dense(q, keys, values, DenseRows(torch.tensor([0]), (0,)), batch_of(((19, 20),)), Mask(), 1.0, None)
    assert np.abs(out.numpy() - 9.5).max() < 1e-9


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9])
def test_a_token_just_written_is_the_one_attended(ops, length):
    """T08: the newest key is ten times the others and must take the weight at once."""
    keys, values = (ops.new_rows(_raw(), 24, 1, 8, torch.float64, "cpu", 4) for _ in "kv")
    pages = torch.tensor([[3, 1, 5]], dtype=torch.int32)
    where = PagedRows(pages, 4)
    for position in range(length):
        slot = pages[0, position // 4].long()[None] * 4 + position % 4
        size = 100.0 if position == length - 1 else 1.0
        ops.write_rows(keys, slot, torch.full((1, 1, 8), size, dtype=torch.float64))
        ops.write_rows(values, slot, torch.full((1, 1, 8), float(position), dtype=torch.float64))
    q = torch.ones(1, 1, 8, dtype=torch.float64)
    out = ops.attend_paged(q, keys, values, where, batch_of(((length - 1, length),)), Mask(), 1.0, None)
    assert np.abs(out.numpy() - (length - 1)).max() < 1e-12


def test_outputs_are_written_whole_and_nothing_beside_them(ops):
    """X08."""
    checks.stores_only_its_own_rows(ops)


def test_queries_may_be_a_slice_of_something_wider(ops):
    """X: q with a pitch, and q whose rows lie off whole heads, give the same answer as a copy."""
    from tests.kernels.cases import step_of

    step = step_of(small(dtype=torch.float64), ops)
    expected = step.attend(ops)
    heads, width = step.q.shape[1:]
    fused = torch.full((step.q.shape[0], heads + 3, width), float("nan"), dtype=torch.float64)
    fused[:, :heads] = step.q
    crooked = torch.full((step.q.shape[0], heads, width + 1), float("nan"), dtype=torch.float64)
    crooked[..., :width] = step.q
    for q in (fused[:, :heads], crooked[..., :width]):
        out = ops.attend_paged(q, step.keys, step.values, step.where, step.batch, step.case.mask, step.case.scale, None)
        assert torch.equal(out, expected)


def _raw():
    from kernels.codec import codec_named

    return codec_named("raw")
