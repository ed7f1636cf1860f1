"""The most bytes that tensors held at once, counted operator by operator: exact on any device, and too slow to time anything under.

It does not know what a tensor is for. Memory that a compiled kernel takes from the system by itself is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorBytes(TorchDispatchMode):
    """Inside `with TensorBytes() as seen`: seen.peak_bytes is the most held by tensors born there."""

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()  # addresses of storages that are alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **({} if kwargs is None else kwargs))
        given = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._born(tensor.untyped_storage(), given)
        return out

    def _born(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name in given or name in self._known:
            return
        self._known.add(name)
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(storage, self._died, name, size).atexit = False

    def _died(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.held_bytes -= size
