"""What a step must move and compute at the least, and how long that takes on a device: bytes, FLOPs and a roofline. No torch.

It does not know what really ran. It counts what no implementation can avoid: every weight once, every visible row once per
span as it is stored, activations in and out of each op; a multiply-add is two FLOPs. Real kernels move more: the distance
to this limit is what a measurement reports as a percentage. Roofline: Williams, Waterman & Patterson 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Spans = Sequence[tuple[int, int]]  # (start, stop) of each span of a step


@dataclass(frozen=True)
class Device:
    """Peaks of a device. flops_per_s: by working dtype, dense, with float32 accumulation. Vendor data sheets unless measured."""

    name: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str


def _gpu(name: str, terabytes_per_s: float, float32: float, half: float, source: str) -> Device:
    flops = {"float32": float32 * 1e12, "bfloat16": half * 1e12, "float16": half * 1e12}
    return Device(name, terabytes_per_s * 1e12, flops, source)


DEVICES = {
    device.name: device
    for device in (
        _gpu("A100", 2.039, 19.5, 312.0, "NVIDIA A100 80 GB SXM data sheet"),
        _gpu("H100", 3.35, 67.0, 989.4, "NVIDIA H100 SXM data sheet, without sparsity"),
        _gpu("H200", 4.8, 67.0, 989.4, "NVIDIA H200 SXM data sheet, without sparsity"),
        _gpu("RTX4090", 1.008, 82.6, 165.2, "NVIDIA Ada GPU architecture paper, without sparsity"),
        _gpu("MI300X", 5.3, 163.4, 1307.4, "AMD Instinct MI300X data sheet, without sparsity"),
    )
}


@dataclass(frozen=True)
class Cost:
    """Bytes moved and FLOPs computed."""

    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, device: Device, dtype: str) -> float:
        """The least time on `device`: the slower of moving and computing."""
        return max(self.bytes / device.bytes_per_s, self.flops / device.flops_per_s[dtype])


@dataclass(frozen=True)
class LayerCosts:
    """One layer as the model sees it and as the strategy stores it."""

    kv_heads: int
    head_dim: int
    row_bytes: float  # K and V of one token as stored, all heads, scales included
    rows_seen: Callable[[int, int], int]  # (start, stop) -> distinct rows that queries start..stop-1 may see
    pairs_seen: Callable[[int, int], int]  # (start, stop) -> (query, key) pairs that they see


@dataclass(frozen=True)
class ModelCosts:
    """The numbers of a model that a step's cost depends on."""

    hidden: int
    intermediate: int
    vocab: int
    query_heads: int
    layers: Sequence[LayerCosts]
    dtype_bytes: int


def step_costs(model: ModelCosts, spans: Spans, logit_rows: int) -> dict[str, Cost]:
    """The cost of one step, by op. `logit_rows`: rows whose logits are asked for."""
    tokens = sum(stop - start for start, stop in spans)
    size, hidden = model.dtype_bytes, model.hidden
    costs = dict.fromkeys(("gemm", "attend", "write_rows", "pointwise", "logits"), Cost())
    for layer in model.layers:
        query_width, kv_width = model.query_heads * layer.head_dim, layer.kv_heads * layer.head_dim
        shapes = (
            (hidden, query_width + 2 * kv_width),
            (query_width, hidden),
            (hidden, 2 * model.intermediate),
            (model.intermediate, hidden),
        )
        for rows, columns in shapes:
            costs["gemm"] += Cost(size * (rows * columns + tokens * (rows + columns)), 2 * tokens * rows * columns)
        seen = sum(layer.rows_seen(start, stop) for start, stop in spans)
        pairs = sum(layer.pairs_seen(start, stop) for start, stop in spans)
        costs["attend"] += Cost(round(seen * layer.row_bytes) + 2 * size * tokens * query_width, 4 * query_width * pairs)
        costs["write_rows"] += Cost(round(tokens * layer.row_bytes) + 2 * size * tokens * kv_width)
        # Two norms with residual (two rows in, two out), rope on q and k (in and out), gate * up (two in, one out).
        moved = 2 * 4 * hidden + 2 * (query_width + kv_width) + 3 * model.intermediate
        costs["pointwise"] += Cost(size * tokens * moved, tokens * (2 * 5 * hidden + 6 * (query_width + kv_width) + 5 * model.intermediate))
    weights = size * hidden * model.vocab
    costs["logits"] = Cost(weights + size * logit_rows * (hidden + model.vocab), 2 * logit_rows * hidden * model.vocab)
    return costs


def total(costs: Mapping[str, Cost]) -> Cost:
    """All ops together."""
    return sum(costs.values(), Cost())


def limit_s(costs: Mapping[str, Cost], device: Device, dtype: str) -> float:
    """The least time of a step: each op at its own roofline, one after another."""
    return sum(cost.seconds(device, dtype) for cost in costs.values())
