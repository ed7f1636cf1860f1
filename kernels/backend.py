"""Which implementation of the ops runs: resolved once, recorded, never swapped behind the caller's back.

Imports torch only when asked to resolve something.
"""

from __future__ import annotations

import importlib
import os

BACKENDS = ("auto", "reference", "cpu", "triton")
_MODULES = {"reference": "kernels.reference", "cpu": "kernels.cpu", "triton": "kernels.gpu"}


class BackendUnavailable(RuntimeError):
    """The backend asked for cannot run here; the message says why and what to use instead."""


def resolve(name: str, device: str = "cpu"):
    """`Ops` of backend `name` for tensors on `device`. `auto`: triton on a GPU (CUDA or ROCm), cpu elsewhere.

    ValueError for an unknown name, BackendUnavailable for one that cannot run on this device.
    """
    from kernels.api import Ops

    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}")
    on_gpu = device.split(":")[0] == "cuda"
    if name == "auto":
        name = "triton" if on_gpu else "cpu"
    if name == "cpu" and on_gpu:
        raise BackendUnavailable("backend=cpu cannot read tensors on a GPU: use backend=triton, reference or auto, or device=cpu")
    if name == "triton":
        _require_triton(on_gpu)
    return Ops(name, importlib.import_module(_MODULES[name]))


def _require_triton(on_gpu: bool) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not on_gpu and not interpreted:
        raise BackendUnavailable(
            "backend=triton needs a GPU and this run is on the CPU: use backend=cpu or auto, "
            "or set TRITON_INTERPRET=1 to check (not time) the kernels in Triton's interpreter"
        )
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise BackendUnavailable(
            f"backend=triton needs the triton package, which cannot be imported ({error}): pip install triton"
        ) from error
