"""The triton backend on a device, for checks that build their tensors on the CPU: everything is moved there, run, and moved back."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from kernels.api import Ops
from kernels.rows import RowStore


class OnDevice:
    """The functions that `Ops` calls on a backend, run on `device`. Stores that are written are copied back whole."""

    def __init__(self, backend: Ops, device: str) -> None:
        self._backend, self._device = backend, device

    def new_rows(self, *arguments):
        return self._backend.new_rows(*arguments)

    def read_rows(self, store, slots):
        return self._run("read_rows", store, slots)

    def write_rows(self, store, slots, rows):
        self._change("write_rows", [store], slots, rows)

    def copy_pages(self, stores, sources, targets):
        self._change("copy_pages", stores, sources, targets)

    def move_rows(self, stores, source, target, count):
        self._change("move_rows", stores, source, target, count)

    def attend_dense(self, *arguments):
        return self._run("attend_dense", *arguments)

    def attend_paged(self, *arguments):
        return self._run("attend_paged", *arguments)

    def attend_packed(self, *arguments):
        return self._run("attend_packed", *arguments)

    def rope(self, *arguments):
        return self._run("rope", *arguments)

    def rms_norm(self, *arguments):
        return self._run("rms_norm", *arguments)

    def gated(self, *arguments):
        return self._run("gated", *arguments)

    def _run(self, op: str, *arguments):
        return moved(getattr(self._backend, op)(*(moved(x, self._device) for x in arguments)), "cpu")

    def _change(self, op: str, stores: list[RowStore], *arguments) -> None:
        there = [moved(store, self._device) for store in stores]
        first = there[0] if op == "write_rows" else there
        getattr(self._backend, op)(first, *(moved(x, self._device) for x in arguments))
        for here, changed in zip(stores, there, strict=True):
            here.codes.copy_(changed.codes)
            if here.scales is not None:
                here.scales.copy_(changed.scales)


def moved(value: Any, device: str) -> Any:
    """`value` with every tensor in it on `device`; strides survive."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(x, device) for x in value)
    if isinstance(value, list):
        return [moved(x, device) for x in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value


def on_device(device: str) -> Ops:
    """The triton backend behind this adapter."""
    from kernels.backend import resolve

    return Ops("triton", OnDevice(resolve("triton", device), device))
