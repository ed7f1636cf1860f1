"""The contract every strategy keeps: sequences are ints, tensors are packed [T, heads, head_dim], the plan says what to feed.

It does not know where rows are stored (the subclasses do) or what the tokens mean (the engine does).

One step: `plan` finds room and says which tokens to feed, `attend` runs once per layer in order, `commit` makes the step
count. `abort` undoes a plan at any point before `commit`. At most one plan is open at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch

from kernels.api import Ops
from kernels.codec import Codec, codec_named
from kernels.rows import Batch, Mask
from strategies.geometry import Geometry, HeadSharing, Refused, Stats
from strategies.static import StaticTensors, bucket


@dataclass(frozen=True, eq=False)
class Plan:
    """One step's work. Feed tokens start..stop-1 of each span, packed in this order.

    `private` is the strategy's own (slots, page tables, how to undo); nobody else may look inside.

    A plan that was padded has a `key`. Plans of equal key have the very same tensors, refilled, so that calls recorded under
    one can be replayed under another. Their tensors speak of B spans and T tokens, pads included, which come last; `spans` has
    none of them.
    """

    spans: tuple[tuple[int, int, int], ...]  # ((sid, start, stop), ...)
    positions: torch.Tensor  # [T] int64
    batch: Batch
    logit_rows: torch.Tensor  # [B] int64, the last row of each span
    private: Any
    key: tuple[int, ...] | None = None  # all that calls of this step depend on beside tensors; None: its tensors are its own

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """[B+1] int32: span b is packed rows cu_seqlens[b]:cu_seqlens[b+1]."""
        return self.batch.cu_seqlens


class Packed:
    """The spans of one step as host arrays, vectorised: no Python work per token. Pads, up to `pad_to` spans, come last."""

    def __init__(self, spans: tuple[tuple[int, int, int], ...], pad_to: int | None = None) -> None:
        self.spans = spans
        self.pads = 0 if pad_to is None else pad_to - len(spans)
        self.bound = None if pad_to is None else bucket(max(stop for _, _, stop in spans))
        self.ranges = tuple((start, stop) for _, start, stop in spans) + ((0, 1),) * self.pads
        self.starts = np.array([start for start, _ in self.ranges], dtype=np.int32)  # [B]
        self.counts = np.array([stop - start for start, stop in self.ranges], dtype=np.int32)  # [B]
        self.cu_seqlens = np.zeros(len(self.ranges) + 1, dtype=np.int32)
        np.cumsum(self.counts, out=self.cu_seqlens[1:])
        offsets = self.starts.astype(np.int64) - self.cu_seqlens[:-1]
        self.positions = np.arange(self.cu_seqlens[-1], dtype=np.int64) + np.repeat(offsets, self.counts)  # [T]


@dataclass
class History:
    """What the base class remembers of one sequence."""

    length: int = 0
    high: int = 0  # the longest length this history ever had, forks included: `rewind` counts from here


class KVCache(ABC):
    """A KV-cache strategy. Subclasses add their own typed keyword parameters: that signature is the config schema.

    budget_bytes is a hard limit on what is reserved from the device; None reserves exactly what the sequences need, and
    what was reserved for one that ended waits for the next: memory that nobody limits is not given back to the device.
    """

    codec_k: Codec = codec_named("raw")
    codec_v: Codec = codec_named("raw")
    heads: HeadSharing | None = None
    keys = "rotated"
    rewind: float = float("inf")
    capturable = False

    def __init__(self, geometry: Geometry, budget_bytes: int | None, backend: Ops) -> None:
        self.geometry = geometry
        self.budget_bytes = budget_bytes
        self.ops = backend
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._masks = [Mask(layer.window) for layer in geometry.layers]
        self._histories: dict[int, History] = {}
        self._sids = count()
        self._open_plan: Plan | None = None
        self._static: StaticTensors | None = None

    def mask(self, layer: int) -> Mask:
        """Which keys a query of `layer` may see: the model's own window, unless the strategy narrows it."""
        return self._masks[layer]

    def aged(self, position: int) -> int:
        """The query at `position` reads tokens below this through the codec and the rest raw. Row codecs: all of them."""
        return position + 1

    def open(self, prompt: Sequence[int] = (), expect: int | None = None) -> int:
        """A new sequence. `expect` is the longest length it may reach; a held prefix of `prompt` may be adopted (see `held`)."""
        sid = next(self._sids)
        self._opened(sid, History(), prompt, expect)
        return sid

    def held(self, sid: int) -> int:
        """Leading tokens that need not be fed again."""
        return self._history(sid).length

    def fork(self, sid: int) -> int:
        """A new sequence with the same history, shared until either one writes."""
        history = self._idle(sid)
        child = next(self._sids)
        self._forked(sid, child)
        self._histories[child] = History(history.length, history.high)
        return child

    def truncate(self, sid: int, length: int) -> None:
        """Forget all tokens from `length` on. CannotRewind if a continuation there needs rows that are gone."""
        history = self._idle(sid)
        if not 0 <= length <= history.length:
            raise ValueError(f"sequence {sid} has {history.length} tokens: cannot truncate it to {length}")
        if length < history.length:
            self._truncated(sid, length)
            history.length = length

    def close(self, sid: int) -> None:
        """Give everything back. The sid is never used again."""
        self._idle(sid)
        self._closed(sid)
        del self._histories[sid]

    def reserve_scratch(self) -> None:
        """Make room for the rows of pads, so that plans may be padded. Billed by `bytes_for` from now on; only before anything is open.

        Refused by a cache that is not `capturable`.
        """
        if not self.capturable:
            raise Refused(
                f"{type(self).__name__} cannot be replayed from a captured graph, so its plans cannot be padded: do without graphs"
            )
        if self._histories:
            raise RuntimeError("scratch rows must be reserved before the first sequence is opened")
        if self._static is None:
            self._scratch_reserved()
            self._static = StaticTensors(self.geometry.device)

    def plan(self, stops: Mapping[int, int], pad_to: int | None = None) -> Plan:
        """Room for each sequence up to its `stop` (> its held length). CacheFull leaves everything as it was.

        pad_to: make it `pad_to` spans of one token each and give it a `key`; for steps that feed every sequence one token, and
        after `reserve_scratch`.
        """
        if self._open_plan is not None:
            raise RuntimeError("a plan is already open: commit or abort it before planning the next step")
        if not stops:
            raise ValueError("nothing to plan: give at least one {sid: stop}")
        spans = []
        for sid, stop in stops.items():
            start = self.held(sid)
            if stop <= start or stop <= self._history(sid).length:
                raise ValueError(f"sequence {sid} holds {self._history(sid).length} tokens: its stop must be larger, not {stop}")
            if stop > self.geometry.context:
                raise ValueError(f"sequence {sid} cannot reach {stop} tokens: the context is {self.geometry.context}")
            spans.append((sid, start, stop))
        if pad_to is None:
            self._open_plan = self._planned(tuple(spans))
        else:
            self._check_padding(spans, pad_to)
            self._open_plan = self._planned(tuple(spans), pad_to)
        return self._open_plan

    def _check_padding(self, spans: Sequence[tuple[int, int, int]], pad_to: int) -> None:
        if self._static is None:
            raise RuntimeError("plans can be padded only after reserve_scratch()")
        if pad_to < len(spans) or any(stop - start != 1 for _, start, stop in spans):
            raise ValueError(f"pad_to={pad_to} takes up to {pad_to} spans of one token each, not {spans}")

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Store k, v [T, Hkv, D] of `layer`, then attend with q [T, Hq, D] -> [T, Hq, D]."""

    def commit(self, plan: Plan, token_ids: Sequence[int]) -> None:
        """The step happened: lengths advance to each span's stop. `token_ids` are the T tokens fed, in packed order."""
        self._close_plan(plan)
        fed = sum(stop - start for _, start, stop in plan.spans)
        if len(token_ids) != fed:
            self._open_plan = plan
            raise ValueError(f"the plan feeds {fed} tokens but {len(token_ids)} token ids were committed")
        for sid, _, stop in plan.spans:
            history = self._histories[sid]
            history.length = stop
            history.high = max(history.high, stop)
        self._committed(plan, token_ids)

    def abort(self, plan: Plan) -> None:
        """As if `plan` had never been called. Aborting an ended plan does nothing, so it is always legal.

        Room made for the plan stays made: reserved memory, and cached prefix pages that were evicted.
        """
        if plan is self._open_plan:
            self._open_plan = None
            self._aborted(plan)

    @abstractmethod
    def stats(self) -> Stats:
        """Bytes now: reserved, in use, live, cached."""

    @abstractmethod
    def bytes_for(self, lengths: Sequence[int], chunk: int = 1) -> int:
        """Bytes that live sequences of these final lengths reserve with no budget set, fed at most `chunk` tokens a step each.

        Pure arithmetic: allocates and changes nothing.
        """

    def bytes_per_token(self) -> float:
        """Bytes that one token's K and V take as stored, scales included, over all layers."""
        return sum(row_bytes(self.geometry, layer, self.codec_k, self.codec_v) for layer in range(len(self.geometry.layers)))

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor held, so that an audit can add their bytes up by itself."""

    # What a storage adds; the base class has already checked the arguments.

    @abstractmethod
    def _opened(self, sid: int, history: History, prompt: Sequence[int], expect: int | None) -> None:
        """Register `history` in self._histories[sid] once nothing can fail any more."""

    @abstractmethod
    def _forked(self, sid: int, child: int) -> None: ...

    @abstractmethod
    def _truncated(self, sid: int, length: int) -> None: ...

    @abstractmethod
    def _closed(self, sid: int) -> None: ...

    @abstractmethod
    def _planned(self, spans: tuple[tuple[int, int, int], ...]) -> Plan:
        """The plan for these spans. A capturable cache takes a second argument, `pad_to`."""

    def _scratch_reserved(self) -> None:  # noqa: B027 (a cache may have scratch rows anyway)
        """Own at least one row that no sequence maps, for pads to share."""

    def _committed(self, plan: Plan, token_ids: Sequence[int]) -> None:  # noqa: B027 (nothing to do is a valid answer)
        pass

    @abstractmethod
    def _aborted(self, plan: Plan) -> None: ...

    def _new_plan(self, packed: Packed, private: Any, constants: tuple[int, ...] = ()) -> Plan:
        """The public half of a plan, on the device. constants: whatever else calls of this step depend on beside tensors."""
        cu_seqlens, starts = self._tensor(packed, "cu_seqlens", packed.cu_seqlens), self._tensor(packed, "starts", packed.starts)
        batch = Batch(cu_seqlens, starts, packed.ranges, bound=packed.bound, pads=packed.pads)
        last_rows = self._tensor(packed, "logit_rows", packed.cu_seqlens[1:].astype(np.int64) - 1)
        positions = self._tensor(packed, "positions", packed.positions)
        key = None if packed.bound is None else (len(packed.positions), len(packed.ranges), packed.bound, batch.splits, *constants)
        return Plan(packed.spans, positions, batch, last_rows, private, key)

    def _tensor(self, packed: Packed, name: str, array: np.ndarray) -> torch.Tensor:
        """`array` on the device: a new tensor, or for a padded step the one that all steps share for this name and shape."""
        return self._to_device(array) if packed.bound is None else self._static.filled(name, array)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.geometry.device)

    def _history(self, sid: int) -> History:
        if sid not in self._histories:
            raise KeyError(f"no sequence {sid}: it was never opened here, or it was closed")
        return self._histories[sid]

    def _idle(self, sid: int) -> History:
        """The history of a sequence that no open plan is writing to."""
        history = self._history(sid)
        if self._open_plan is not None and any(sid == planned for planned, _, _ in self._open_plan.spans):
            raise RuntimeError(f"sequence {sid} is part of an open plan: commit or abort it first")
        return history

    def _close_plan(self, plan: Plan) -> None:
        if plan is not self._open_plan:
            raise RuntimeError("this plan is not open: it was committed or aborted before")
        self._open_plan = None


def row_bytes(geometry: Geometry, layer: int, codec_k: Codec, codec_v: Codec) -> int:
    """Bytes of one token's K and V in one layer, scales included."""
    shape = geometry.layers[layer]
    return shape.kv_heads * sum(codec.row_bytes(shape.head_dim, geometry.dtype) for codec in (codec_k, codec_v))
