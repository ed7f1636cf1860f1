"""Plan tensors at addresses that stay: what a captured graph reads is refilled in place, never made anew.

It does not know what the tensors mean. They are indices, not keys or values, so no KV bill counts them.
"""

from __future__ import annotations

import numpy as np
import torch

SMALLEST_BOUND = 256  # tokens; below it, steps of all lengths are launched alike


def bucket(stop: int) -> int:
    """The bound that a step whose longest span stops at `stop` is planned for: a power of two, so that few graphs serve all lengths."""
    return max(SMALLEST_BOUND, 1 << (stop - 1).bit_length())


class StaticTensors:
    """One tensor on `device` for each name, dtype and shape, for as long as this lives."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._tensors: dict[tuple, torch.Tensor] = {}

    def filled(self, name: str, array: np.ndarray) -> torch.Tensor:
        """The tensor called `name` of this dtype and shape, holding `array` from now until it is filled again."""
        source = torch.from_numpy(array)
        key = (name, source.dtype, source.shape)
        if key not in self._tensors:
            self._tensors[key] = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        return self._tensors[key].copy_(source)
