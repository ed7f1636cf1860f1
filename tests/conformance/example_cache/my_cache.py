"""A KV cache of one's own, complete: each sequence has one tensor a layer, rebuilt with every step, rows kept in half precision.

What is written here is all that a new storage has to say: `KVCache` has checked every argument before it calls. Run with this
folder on PYTHONPATH:

    python -m harness.conformance my_cache:Concat
    python -m harness +strategy=mine --config-dir conf
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from harness.conformance.codecs import RoundTrip
from kernels.api import Ops
from kernels.reference import attend_one, compute_dtype
from strategies.base import History, KVCache, Packed, Plan
from strategies.geometry import CacheFull, Geometry, Refused, Stats
from strategies.masks import live_union


@dataclass(frozen=True)
class Format:
    """The name that records show for how rows are kept."""

    name: str


HALF = Format("half")
# How the format reads back, in NumPy, so that the kit can tell a right answer from a wrong one.
ROUND_TRIPS = {"half": RoundTrip(lambda rows, dtype: rows.astype(np.float32).astype(np.float16).astype(np.float64))}


@dataclass(frozen=True, eq=False)
class Rows:
    """Keys and values of each layer, [n, Hkv, D] float16. Never written to: forks share the object, a cut history reads less of it."""

    size: int
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass
class Step:
    """The private half of a plan: what each layer has attended so far, kept or thrown away at the end of the step."""

    grown: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)  # sid -> (keys, values) of each layer


class Concat(KVCache):
    """limit: the most tokens that one sequence may have here, or null for the model's own context."""

    def __init__(self, geometry: Geometry, budget_bytes: int | None, backend: Ops, *, limit: int | None = None) -> None:
        super().__init__(geometry, budget_bytes, backend)
        if limit is not None and limit < 1:
            raise Refused(f"limit={limit}: a sequence has 1 token or more")
        self.codec_k = self.codec_v = HALF
        self.limit = limit
        self._rows: dict[int, Rows] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        self.ops.calls["attend_concat"] += 1
        out, at = torch.empty_like(q), 0
        for sid, start, stop in plan.spans:
            own = slice(at, at + stop - start)
            at = own.stop
            new = (k[own].float().half(), v[own].float().half())
            old = [rows[:start] for rows in self._rows[sid].layers[layer]]
            pair = tuple(torch.cat(halves) for halves in zip(old, new, strict=True))  # [stop, Hkv, D] each
            plan.private.grown[sid].append(pair)
            wide = [rows.to(compute_dtype(self.dtype)) for rows in pair]
            queries, keys = torch.arange(start, stop, device=q.device), torch.arange(stop, device=q.device)
            out[own] = attend_one(q[own], *wide, queries, keys, self.mask(layer), self.geometry.scale, self.geometry.softcap)
        return out

    def stats(self) -> Stats:
        held = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())
        lengths: dict[int, set[int]] = {}  # rows object -> lengths of the histories that read it
        for sid, rows in self._rows.items():
            lengths.setdefault(id(rows), set()).add(self._histories[sid].length)
        layers = range(len(self.geometry.layers))
        live = sum(self._layer_bytes(layer) * live_union(self.mask(layer), shared) for shared in lengths.values() for layer in layers)
        return Stats(held, held, live, 0)

    def bytes_for(self, lengths: Sequence[int], chunk: int = 1) -> int:
        return sum(lengths) * self._token_bytes()

    def bytes_per_token(self) -> float:
        return self._token_bytes()

    def tensors(self) -> list[torch.Tensor]:
        distinct = {id(rows): rows for rows in self._rows.values()}.values()
        return [tensor for rows in distinct for pair in rows.layers for tensor in pair]

    def _opened(self, sid: int, history: History, prompt: Sequence[int], expect: int | None) -> None:
        empty = [
            torch.empty(0, shape.kv_heads, shape.head_dim, dtype=torch.float16, device=self.geometry.device)
            for shape in self.geometry.layers
        ]
        self._rows[sid] = Rows(0, tuple((rows, rows) for rows in empty))
        self._histories[sid] = history

    def _forked(self, sid: int, child: int) -> None:
        self._rows[child] = self._rows[sid]

    def _truncated(self, sid: int, length: int) -> None:
        pass

    def _closed(self, sid: int) -> None:
        del self._rows[sid]

    def _planned(self, spans: tuple[tuple[int, int, int], ...]) -> Plan:
        asked = {sid: stop for sid, _, stop in spans}
        if self.limit is not None and max(asked.values()) > self.limit:
            raise ValueError(f"a sequence cannot reach {max(asked.values())} tokens here: limit={self.limit}")
        kept = {id(rows): rows.size for sid, rows in self._rows.items() if sid not in asked}
        needed = (sum(kept.values()) + sum(asked.values())) * self._token_bytes()
        if self.budget_bytes is not None and needed > self.budget_bytes:
            raise CacheFull(needed - self.budget_bytes, tuple(asked))
        return self._new_plan(Packed(spans), Step({sid: [] for sid in asked}))

    def _committed(self, plan: Plan, token_ids: Sequence[int]) -> None:
        for sid, _, stop in plan.spans:
            self._rows[sid] = Rows(stop, tuple(plan.private.grown[sid]))

    def _aborted(self, plan: Plan) -> None:
        pass

    def _layer_bytes(self, layer: int) -> int:
        shape = self.geometry.layers[layer]
        return 2 * 2 * shape.kv_heads * shape.head_dim  # keys and values, 2 bytes each

    def _token_bytes(self) -> int:
        return sum(map(self._layer_bytes, range(len(self.geometry.layers))))
