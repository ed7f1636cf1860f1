"""rope, rms_norm and the gated activation in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import NAMES
from tests.kernels.gpu import checks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_rope_turns_pairs(ops, dtype):
    checks.rotates(ops, dtype, 24, 12)


def test_rope_leaves_the_lanes_past_its_pairs(ops):
    checks.rotates(ops, torch.float32, 40, 5)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_rms_norm_is_of_the_sum_as_stored(ops, dtype, residual):
    checks.normalises(ops, dtype, 40, residual)


def test_rms_norm_takes_rows_of_one_axis_and_long_ones(ops, reference):
    x, weight = torch.randn(3000, generator=torch.Generator().manual_seed(0)), torch.ones(3000)
    got, expected = ops.rms_norm(x, weight, 1e-6, None)[0], reference.rms_norm(x, weight, 1e-6, None)[0]
    assert got.shape == (3000,)
    assert (got - expected).abs().max() < 1e-6


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_the_gate_multiplies(ops, dtype, activation):
    checks.gates(ops, dtype, activation)
