"""The Triton kernels in Triton's interpreter, with every NumPy warning an error: an overflowing address is one.

`tests/conftest.py` sets TRITON_INTERPRET=1 before anything imports triton. Tests that need the compiler start a process without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from kernels.api import Ops


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
def functions_are_patched_once() -> Iterator[None]:
    """Nearly half of the interpreter's time goes into patching triton.language again for each function that a kernel calls."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(function):
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()
        return patch(function)

    interpreter._patch_lang = patch_once
    yield
    interpreter._patch_lang = patch


@pytest.fixture(autouse=True)
def numpy_warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield
