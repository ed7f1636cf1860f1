"""The cost model against counts done by hand and by brute force."""

from __future__ import annotations

import pytest

from harness.measure.costs import DEVICES, Cost, Device, LayerCosts, ModelCosts, limit_s, step_costs, total
from harness.measure.limits import _seen, card
from kernels.backend import resolve
from kernels.rows import Mask
from strategies.contiguous import Contiguous
from strategies.geometry import Geometry, LayerShape
from strategies.none import NoCache


class Facts:
    """The few facts of a model that the cost model reads."""

    hidden, intermediate, vocab, query_heads = 12, 20, 30, 4


GEOMETRY = Geometry((LayerShape(2, 8), LayerShape(2, 8)), 4, 1.0, None, "float32", "cpu", 64)


@pytest.mark.parametrize("mask", [Mask(), Mask(1), Mask(5), Mask(5, 2), Mask(3, 7)])
@pytest.mark.parametrize("span", [(0, 1), (0, 9), (4, 5), (7, 12), (11, 12)])
def test_rows_and_pairs_are_what_the_mask_allows(mask, span):
    def sees(i: int, j: int) -> bool:
        return j <= i and (mask.window is None or i - j < mask.window or j < mask.sinks)

    pairs = [(i, j) for i in range(*span) for j in range(span[1]) if sees(i, j)]
    rows_seen, pairs_seen = _seen(mask)
    assert pairs_seen(*span) == len(pairs)
    assert rows_seen(*span) == len({j for _, j in pairs})


def test_a_decode_step_counts_weights_once_and_rows_as_stored():
    layer = LayerCosts(2, 8, 50, *_seen(Mask()))
    model = ModelCosts(12, 20, 30, 4, [layer], 4)
    costs = step_costs(model, [(9, 10), (3, 4)], 2)
    weights = 12 * (32 + 32) + 32 * 12 + 12 * 40 + 20 * 12
    activations = 2 * ((12 + 64) + (32 + 12) + (12 + 40) + (20 + 12))
    assert costs["gemm"] == Cost(4 * (weights + activations), 2 * 2 * weights)
    assert costs["attend"] == Cost((10 + 4) * 50 + 2 * 4 * 2 * 32, 4 * 32 * (10 + 4))
    assert costs["logits"] == Cost(4 * (12 * 30 + 2 * (12 + 30)), 2 * 2 * 12 * 30)
    assert total(costs).flops == sum(cost.flops for cost in costs.values())


def test_a_published_count_is_reproduced():
    """A 7B model at 4,096 hidden, 32 layers, 32 KV heads of 128 in float16 moves 33.5 MB of KV a layer at 2,048 tokens."""
    layer = LayerCosts(32, 128, 2 * 2 * 32 * 128, *_seen(Mask()))
    costs = step_costs(ModelCosts(4096, 11008, 32000, 32, [layer] * 32, 2), [(2047, 2048)], 1)
    assert costs["attend"].bytes / 32 == pytest.approx(33.55e6, rel=1e-3)


def test_the_limit_is_the_slower_of_moving_and_computing():
    device = Device("toy", 100.0, {"float32": 10.0}, "made up")
    assert Cost(200, 10).seconds(device, "float32") == 2.0
    assert Cost(100, 50).seconds(device, "float32") == 5.0
    assert limit_s({"a": Cost(200, 10), "b": Cost(100, 50)}, device, "float32") == 7.0


@pytest.mark.parametrize("name", DEVICES)
def test_named_devices_compute_half_precision_no_slower_than_single(name):
    flops = DEVICES[name].flops_per_s
    assert flops["bfloat16"] >= flops["float32"]


def test_a_smaller_codec_moves_fewer_bytes_and_no_cache_computes_more():
    def found(storage, **parameters):
        return card(Facts, storage(GEOMETRY, None, resolve("reference"), **parameters), 1, 40, DEVICES["A100"])

    raw, int8, none = found(Contiguous), found(Contiguous, codec_k="int8", codec_v="int8"), found(NoCache)
    assert raw["kv_bytes"] - int8["kv_bytes"] == 41 * 2 * 2 * 2 * (8 * 4 - (8 + 4))
    assert none["flops"] > 10 * raw["flops"]
