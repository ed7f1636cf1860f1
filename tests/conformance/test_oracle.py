"""The dense oracle: right by hand, and its bounds neither broken by honest arithmetic nor too wide to see a fault."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.conformance.oracle import Rows, Rule, answer, exact, visible
from kernels.reference import attend_one
from kernels.rows import Mask

DTYPES = ("float32", "bfloat16", "float16")


def _inputs(dtype: str, tokens: int, heads: tuple[int, int], head_dim: int, spread: float = 1.0):
    rng = np.random.default_rng(tokens + head_dim)
    shapes = [(tokens, heads[0], head_dim), (tokens, heads[1], head_dim), (tokens, heads[1], head_dim)]
    return [torch.from_numpy(rng.normal(size=shape) * spread).to(getattr(torch, dtype)) for shape in shapes]


def _rule(
    tokens: int, start: int = 0, window: int | None = None, sinks: int = 0, scale: float = 0.25, softcap: float | None = None
) -> Rule:
    return Rule(start, start + 1 + np.arange(tokens - start), window, sinks, scale, softcap)


def _rows(x: torch.Tensor) -> Rows:
    array = x.double().numpy()
    return Rows(array, array)


def test_visible_is_the_rule_of_the_contract():
    seen = visible(np.arange(6), np.arange(6), 2, 1)
    assert [np.nonzero(row)[0].tolist() for row in seen] == [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5]]
    assert visible(np.arange(4), np.arange(4), None, 0).tolist() == np.tril(np.ones((4, 4), bool)).tolist()


def test_uniform_keys_average_the_visible_values():
    q, k, v = np.ones((4, 2, 3)), np.zeros((4, 1, 3)), np.arange(12.0).reshape(4, 1, 3)
    out = exact(q, Rows(k, k), Rows(v, v), _rule(4, window=2))
    assert np.allclose(out[:, 0, 0], [0, 1.5, 4.5, 7.5], atol=1e-15)


def test_query_heads_read_their_own_kv_head():
    v = np.broadcast_to(np.arange(3.0)[None, :, None], (2, 3, 4)).copy()
    out = exact(np.ones((2, 6, 4)), Rows(np.zeros((2, 3, 4)), np.zeros((2, 3, 4))), Rows(v, v), _rule(2))
    assert out[1, :, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_only_aged_tokens_are_read_through_the_codec():
    raw, read = np.arange(4.0).reshape(4, 1, 1), np.full((4, 1, 1), 10.0)
    rule = Rule(3, np.array([2]), None, 0, 1.0, None)
    out = exact(np.zeros((1, 1, 1)), Rows(raw * 0, raw * 0), Rows(raw, read), rule)
    assert out.item() == pytest.approx((10 + 10 + 2 + 3) / 4)


def test_the_softcap_bends_the_scores():
    q, k, v = np.full((2, 1, 1), 3.0), np.array([[[0.0]], [[5.0]]]), np.array([[[0.0]], [[1.0]]])
    out = exact(q, Rows(k, k), Rows(v, v), Rule(0, np.array([1, 2]), None, 0, 1.0, 2.0))
    assert out[1].item() == pytest.approx(1 / (1 + np.exp(-2 * np.tanh(7.5))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim", "spread"), [(9, (6, 3), 8, 1.0), (60, (4, 1), 80, 1.5), (200, (4, 4), 16, 4.0)])
def test_honest_rounding_stays_within_the_bound(dtype, tokens, heads, head_dim, spread):
    q, k, v = _inputs(dtype, tokens, heads, head_dim, spread)
    positions = torch.arange(tokens)
    got = attend_one(q, k, v, positions, positions, Mask(30, 2), 0.25, None).double().numpy()
    want = answer(q.double().numpy(), _rows(k), _rows(v), _rule(tokens, window=30, sinks=2), dtype)
    assert (np.abs(got - want.out) <= want.bound).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_rounded_once_to_the_working_dtype_stay_within_the_bound(dtype):
    q, k, v = _inputs(dtype, 50, (2, 2), 16)
    scores = torch.einsum("thd,nhd->htn", q.float(), k.float()) * 0.25
    hidden = torch.ones(50, 50, dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1).to(q.dtype).float()
    got = torch.einsum("htn,nhd->thd", weights, v.float()).to(q.dtype).double().numpy()
    want = answer(q.double().numpy(), _rows(k), _rows(v), _rule(50), dtype)
    assert (np.abs(got - want.out) <= want.bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_forgotten_key_is_far_outside_the_bound(dtype):
    q, k, v = _inputs(dtype, 40, (4, 2), 16)
    want = answer(q.double().numpy(), _rows(k), _rows(v), _rule(40, window=8), dtype)
    wrong = exact(q.double().numpy(), _rows(k), _rows(v), _rule(40, window=7))
    assert (np.abs(wrong - want.out)[8:].max(axis=(1, 2)) > 3 * want.bound[8:].max(axis=(1, 2))).all()


def test_float64_promises_a_billionth():
    q, k, v = _inputs("float64", 30, (2, 1), 16)
    want = answer(q.numpy(), _rows(k), _rows(v), _rule(30), "float64")
    assert want.bound.min() >= 1e-9
    assert want.bound.max() < 5e-9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_huge_scores_keep_a_finite_bound(dtype):
    q, k, v = (torch.full((4, 1, 128), 24.0, dtype=getattr(torch, dtype)) for _ in range(3))
    want = answer(q.double().numpy(), _rows(k), _rows(v), _rule(4, scale=128**-0.5), dtype)
    assert np.isfinite(want.bound).all()
