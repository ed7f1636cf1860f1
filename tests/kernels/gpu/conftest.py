"""The Triton kernels in Triton's interpreter, with every NumPy warning an error: an overflowing address is one.

`tests/conftest.py` sets TRITON_INTERPRET=1 before anything imports triton. Tests that need the compiler start a process without it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.api import Ops
from tests.interpreter import functions_patched_once, numpy_warnings_as_errors


@pytest.fixture(scope="session")
def ops() -> Ops:
    """The triton backend, interpreted."""
    from kernels.backend import resolve
    from kernels.gpu.launch import interpreted

    assert interpreted, "triton was imported before TRITON_INTERPRET=1 was set: import it inside a test, not while collecting"
    return resolve("triton")


@pytest.fixture(scope="session")
def reference() -> Ops:
    from kernels.backend import resolve

    return resolve("reference")


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with functions_patched_once():
        yield


@pytest.fixture(autouse=True)
def numpy_warnings_are_errors() -> Iterator[None]:
    with numpy_warnings_as_errors():
        yield
