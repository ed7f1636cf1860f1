"""Triton's interpreter made quick enough for many small runs, and strict. It knows nothing of what is interpreted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def functions_patched_once() -> Iterator[None]:
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
    try:
        yield
    finally:
        interpreter._patch_lang = patch


@contextmanager
def integers_unchecked() -> Iterator[None]:
    """A fifth of the time goes into asking every integer sum and product whether it overflows: for runs too small to overflow any."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    options, builder.options = builder.options, interpreter.InterpreterOptions(sanitize_overflow=False)
    try:
        yield
    finally:
        builder.options = options


@contextmanager
def numpy_warnings_as_errors() -> Iterator[None]:
    """An address that overflows or an undefined conversion is a NumPy warning; here it is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield
