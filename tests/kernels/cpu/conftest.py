"""The CPU ops in both of their flavours. It knows nothing of what is tested."""

from __future__ import annotations

import pytest

import kernels.cpu
from kernels.api import Ops
from kernels.cpu import plain


@pytest.fixture(params=["torch", "compiled"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """The ops through torch alone, and as the backend hands them out when its compiler is installed."""
    if request.param == "torch":
        return Ops("cpu", plain)
    if not kernels.cpu.COMPILED:
        pytest.skip(f"compiled kernels cannot run here: {kernels.cpu.FLAVOUR}")
    return Ops("cpu", kernels.cpu)
