"""The CPU matrix product against float64: as close as torch's own product in float32, rounded once."""

from __future__ import annotations

import pytest
import torch

import kernels.cpu
from tests.kernels.cases import NAMES, assert_as_close_as_reference

pytestmark = pytest.mark.skipif(not kernels.cpu.COMPILED, reason="needs the compiled kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=NAMES.get)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("outputs", "inner"), [(960, 576), (5, 64), (67, 96), (130, 50)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 20])
def test_linear(tokens: int, outputs: int, inner: int, with_bias: bool, dtype: torch.dtype) -> None:
    from kernels.cpu.native_linear import linear

    seed = torch.Generator().manual_seed(outputs)
    x, weight, bias = (torch.randn(shape, generator=seed).to(dtype) for shape in ((tokens, inner), (outputs, inner), (outputs,)))
    added = bias if with_bias else None
    honest = (x.float() @ weight.float().T + (0 if added is None else bias.float())).to(dtype)
    exact = x.double() @ weight.double().T + (0 if added is None else bias.double())
    assert_as_close_as_reference(linear(x, weight, added), honest, exact.numpy())


def test_rows_of_a_batch_do_not_depend_on_each_other() -> None:
    from kernels.cpu.native_linear import linear

    x, weight = (torch.randn(n, 128, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (8, 300))
    together = linear(x, weight, None)
    for row in range(8):
        assert torch.equal(linear(x[row : row + 1], weight, None)[0], together[row])
