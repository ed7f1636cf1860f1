"""Compiling a kernel once and keeping it on disk, next to the sources, else in the user's cache folder (NUMBA_CACHE_DIR overrides both).

A kernel takes the address of its int64 arguments and returns nothing, so that any pool of threads can call it. It does not
know what a kernel does.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from numba import cfunc, config, njit, types

_HERE = Path(__file__).parent

# A function that only kernels call: no wrappers for Python, which would cost more to compile than the function.
inline = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def kernel(function: Callable):
    """`function(args)` as a C function of one int64, compiled for this host. NaN and infinity mean what they mean."""
    with _cached():
        return cfunc(types.void(types.int64), cache=True, error_model="numpy", fastmath={"contract"})(function)


@contextmanager
def _cached() -> Iterator[None]:
    """numba looks only at a kernel's own file to see whether it changed; a folder named after all of them keeps every kernel honest."""
    before = config.CACHE_DIR
    if not before:
        config.CACHE_DIR = str(_folder())
    try:
        yield
    finally:
        config.CACHE_DIR = before


def _folder() -> Path:
    sources = hashlib.sha256()
    for path in sorted(_HERE.glob("*.py")):
        sources.update(path.name.encode() + path.read_bytes())
    name = f"compiled-{sources.hexdigest()[:16]}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for parent in (_HERE / "__pycache__", home / "kvbench"):
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            return parent / name
    return Path(tempfile.mkdtemp(prefix="kvbench-"))
