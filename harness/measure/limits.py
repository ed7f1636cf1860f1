"""From a strategy on a model to what its steps cost at the least, and what this machine can move and compute at the most.

It does not know what was measured; `run.py` puts both side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.measure.clock import device_timed
from harness.measure.costs import Device, LayerCosts, ModelCosts, limit_s, step_costs, total

if TYPE_CHECKING:
    from kernels.rows import Mask
    from strategies.base import KVCache

READ_BYTES = 256 << 20  # far larger than any cache of a CPU
ROUNDS = 5


def model_costs(architecture, cache: KVCache) -> ModelCosts:
    """The cost model of `architecture` with the rows as `cache` stores them (a held one's own widths; none stores nothing)."""
    from kernels.codec import DTYPE_BYTES

    shapes, size = cache.geometry.layers, DTYPE_BYTES[cache.geometry.dtype]
    width = sum(shape.kv_heads * shape.head_dim for shape in shapes)
    stored = cache.bytes_per_token()
    layers = []
    for index, shape in enumerate(shapes):
        rows = stored * shape.kv_heads * shape.head_dim / width if stored else 2 * size * shape.kv_heads * shape.head_dim
        rows_seen, pairs_seen = _seen(cache.mask(index))
        layers.append(LayerCosts(shape.kv_heads, shape.head_dim, rows, rows_seen, pairs_seen))
    a = architecture
    return ModelCosts(a.hidden, a.intermediate, a.vocab, a.query_heads, layers, size)


def _seen(mask: Mask) -> tuple[Callable[[int, int], int], Callable[[int, int], int]]:
    def pairs(start: int, stop: int) -> int:
        if mask.window is None:
            return (stop * (stop + 1) - start * (start + 1)) // 2
        return sum(i + 1 - mask.first_visible(i) + min(mask.sinks, mask.first_visible(i)) for i in range(start, stop))

    def rows(start: int, stop: int) -> int:
        first = mask.first_visible(start)
        return stop - first + min(mask.sinks, first)

    return rows, pairs


def card(architecture, cache: KVCache, batch: int, context: int, device: Device) -> dict[str, object]:
    """One decode step of `batch` sequences at `context` tokens: bytes and FLOPs by op, and the least time on `device`."""
    start = 0 if cache.bytes_per_token() == 0 else context
    costs = step_costs(model_costs(architecture, cache), [(start, context + 1)] * batch, batch)
    whole = total(costs)
    dtype = "float32" if cache.geometry.dtype == "float64" else cache.geometry.dtype
    return {
        "batch": batch,
        "context": context,
        "device": device.name,
        "bytes": whole.bytes,
        "flops": whole.flops,
        "kv_bytes": costs["attend"].bytes,
        "limit_s": limit_s(costs, device, dtype),
        "ops": {name: {"bytes": cost.bytes, "flops": cost.flops, "limit_s": cost.seconds(device, dtype)} for name, cost in costs.items()},
    }


def this_machine(dtype: str, device: str = "cpu") -> Device:
    """Read bandwidth and GEMM rate of the device that the run is on, measured now: the best of a few rounds each."""
    import torch

    torch_dtype = getattr(torch, "float32" if dtype == "float64" else dtype)
    data = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    read_s = min(device_timed(device, data.sum, ROUNDS))
    left, right = (torch.ones(1024, 1024, dtype=torch_dtype, device=device) for _ in range(2))
    gemm_s = min(device_timed(device, lambda: left @ right, ROUNDS))
    name = "float32" if dtype == "float64" else dtype
    return Device("this machine", READ_BYTES / read_s, {name: 2 * 1024**3 / gemm_s}, "measured before the run, best of a few rounds")
