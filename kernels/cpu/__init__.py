"""The ops on a CPU: compiled where numba is installed and the dtype has a kernel, through torch alone elsewhere.

The row layout is the reference's. `COMPILED` and `FLAVOUR` say which of the two this installation is; `NATIVE` says which
dtypes have kernels. Nothing here knows which sequence a row belongs to.
"""

from __future__ import annotations

import torch

from kernels.chained import Chain, ChainModel
from kernels.cpu import plain
from kernels.reference import move_rows, new_rows, read_rows
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

try:
    import numba  # noqa: F401  (a missing or broken compiler means torch; a fault in our own modules below must not)
except ImportError as error:
    COMPILED = False
    FLAVOUR = f"torch ({error}; pip install 'kvbench[cpu]' for compiled kernels)"
else:
    from kernels.cpu import chain, native, native_linear, native_rows, team
    from kernels.cpu.emit import LANES, host_converts_float16

    COMPILED = host_converts_float16()
    FLAVOUR = f"compiled, {LANES} floats a vector, {team.described()}" if COMPILED else "torch (this CPU converts no float16)"

_STORED = frozenset((torch.float32, torch.bfloat16, torch.float16)) if COMPILED else frozenset()
_COMPUTED = frozenset((torch.float32, torch.bfloat16)) if COMPILED else frozenset()
# Working dtypes that have a compiled kernel, by op; the others go through torch. read_rows and move_rows are rare and always do.
NATIVE = {
    "attend_dense": _STORED,
    "attend_paged": _STORED,
    "attend_packed": _STORED,
    "write_rows": _STORED,
    "copy_pages": _STORED | {torch.float64} if COMPILED else frozenset(),
    "rope": _COMPUTED,
    "rms_norm": _COMPUTED,
    "gated": _COMPUTED,
    "linear": frozenset(native_linear.COMPILED_DTYPES) if COMPILED else frozenset(),
}

__all__ = [
    "attend_dense",
    "attend_packed",
    "attend_paged",
    "copy_pages",
    "gated",
    "linear",
    "move_rows",
    "new_rows",
    "read_rows",
    "rms_norm",
    "rope",
    "write_rows",
]


def attend_dense(
    q: torch.Tensor, keys: RowStore, values: RowStore, where: DenseRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    ops = native if q.dtype in _STORED else plain
    return ops.attend_dense(q, keys, values, where, batch, mask, scale, softcap)


def attend_paged(
    q: torch.Tensor, keys: RowStore, values: RowStore, where: PagedRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    ops = native if q.dtype in _STORED else plain
    return ops.attend_paged(q, keys, values, where, batch, mask, scale, softcap)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    ops = native if q.dtype in _STORED else plain
    return ops.attend_packed(q, k, v, batch, mask, scale, softcap)


def write_rows(store: RowStore, slots: torch.Tensor, rows: torch.Tensor) -> None:
    ops = native_rows if rows.dtype in _STORED else plain
    ops.write_rows(store, slots, rows)


def copy_pages(stores: list[RowStore], sources: torch.Tensor, targets: torch.Tensor) -> None:
    ops = native_rows if COMPILED else plain
    ops.copy_pages(stores, sources, targets)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    ops = native_rows if x.dtype in _COMPUTED else plain
    return ops.rope(x, cos, sin)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    ops = native_rows if x.dtype in _COMPUTED else plain
    return ops.rms_norm(x, weight, eps, residual)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    ops = native_rows if gate_up.dtype in _COMPUTED else plain
    return ops.gated(gate_up, activation)


def chained(model: ChainModel, tokens: int) -> Chain | None:
    """What a decode step of `tokens` rows computes between attentions, as one call (see chain.py); None where it is not compiled."""
    if not COMPILED or tokens > native_linear.FEW or not chain.can_chain(model):
        return None
    return chain.Chain(model, tokens)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    ops = native_linear if x.dtype in NATIVE["linear"] else torch.nn.functional
    return ops.linear(x, weight, bias)
