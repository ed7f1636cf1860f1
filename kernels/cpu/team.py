"""Running one compiled kernel on as many threads as torch uses: torch's own OpenMP pool where it can be found, else Python threads.

Every thread calls the kernel once; the kernel hands out its tasks through a counter. It does not know what a kernel does.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

_local = threading.local()


def run(address: int, args: int, threads: int) -> None:
    """Call the kernel at `address` with the address `args`, once on each of `threads` threads, and wait for all."""
    if threads == 1:
        _function(address)(args)
        return
    fork = _openmp_fork()
    if fork is not None:
        fork(address, args, threads, 0)
        return
    function = _function(address)
    others = [_pool(threads - 1).submit(function, args) for _ in range(threads - 1)]
    function(args)
    wait(others)


@lru_cache(maxsize=1)
def fork_address() -> int | None:
    """The address of GOMP_parallel, for compiled code to call; None where torch's threads cannot be shared."""
    fork = _openmp_fork()
    return None if fork is None else ctypes.cast(fork, ctypes.c_void_p).value


def described() -> str:
    """Whose threads these are, for records."""
    return "Python threads" if _openmp_fork() is None else "OpenMP threads shared with torch"


def workspace(name: str, size: int) -> int:
    """The address of at least `size` bytes that stay this Python thread's own; their content is undefined."""
    held = getattr(_local, name, None)
    if held is None or held[1] < size:
        array = np.empty(size + 64, dtype=np.uint8)
        held = (array, size, -(-array.ctypes.data // 64) * 64)
        setattr(_local, name, held)
    return held[2]


@lru_cache(maxsize=64)
def _function(address: int):
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)


@lru_cache(maxsize=1)
def _openmp_fork():
    """GOMP_parallel of the OpenMP library that torch has loaded, so that both use one pool; None where torch has another kind."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*")) + [Path("libgomp.so.1")]:
        try:
            fork = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        fork.argtypes, fork.restype = (ctypes.c_int64, ctypes.c_int64, ctypes.c_uint, ctypes.c_uint), None
        return fork
    return None


@lru_cache(maxsize=8)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kernels")
