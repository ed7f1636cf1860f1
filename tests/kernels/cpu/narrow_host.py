"""A pytest plugin (`-p tests.kernels.cpu.narrow_host`): the compiler is told of no AVX-512, so kernels are made for registers half as wide.

Kernels are kept by their sources alone, so give NUMBA_CACHE_DIR a folder of its own.
"""

from __future__ import annotations

import llvmlite.binding as llvm

_found = llvm.get_host_cpu_features


def _narrower():
    features = _found()
    for name in [name for name in features if name.startswith("avx512")]:
        features[name] = False
    return features


llvm.get_host_cpu_features = _narrower
