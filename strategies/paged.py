"""Pages of a few tokens, found through a table: PagedAttention (Kwon et al. 2023), with windows, forks and prefix reuse.

It does not know what tokens mean; with `prefix` it compares their ids. Layers that see the same keys share one page pool
and one table (a `Lane`, in `lanes.py`); layers with another window have their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.api import Ops
from kernels.codec import codec_named
from kernels.rows import PagedRows
from strategies.base import History, KVCache, Packed, Plan
from strategies.budget import rebalance, split
from strategies.geometry import CannotRewind, Geometry, HeadSharing, Refused, Stats
from strategies.lanes import Lane, Taken
from strategies.masks import combined_mask
from strategies.prefix import Node, PrefixIndex


@dataclass(frozen=True)
class Placement:
    """The private half of a plan: for each lane the slots to write, the table to read, and what to give back."""

    slots: tuple[torch.Tensor, ...]  # per lane [T] int64
    where: tuple[PagedRows, ...]
    taken: tuple[Taken, ...]


class Paged(KVCache):
    """page_size: tokens a page. window, sinks: what a query may see, on top of the model's own windows; pages that slid out
    are given back, sink pages are pinned, positions stay absolute (StreamingLLM, Xiao et al. 2023, re-numbers them: another
    method). slack: tokens that `truncate` can take back, counted from the longest length, when some layer drops pages; a
    cache that drops none can always rewind. prefix: whole pages of ended or running sequences are found again by `open`; those
    that no sequence maps last until their memory is needed, so without a budget, which sets none aside for them, not for long.
    """

    capturable = True

    def __init__(
        self,
        geometry: Geometry,
        budget_bytes: int | None,
        backend: Ops,
        *,
        page_size: int = 16,
        window: int | None = None,
        sinks: int = 0,
        slack: int = 0,
        prefix: bool = False,
        codec_k: str = "raw",
        codec_v: str = "raw",
        heads: HeadSharing | None = None,
    ) -> None:
        super().__init__(geometry, budget_bytes, backend)
        if page_size < 1:
            raise Refused(f"page_size={page_size}: a page holds 1 token or more")
        if slack < 0:
            raise Refused(f"slack={slack}: use 0 or more tokens")
        if window is None and sinks:
            raise Refused(f"sinks={sinks} with window=null changes nothing: set a window, or sinks=0")
        self.page_size, self.window, self.sinks, self.slack = page_size, window, sinks, slack
        self.codec_k, self.codec_v, self.heads = codec_named(codec_k), codec_named(codec_v), heads
        self._masks = [combined_mask(layer.window, window, sinks) for layer in geometry.layers]
        self._index = PrefixIndex(page_size) if prefix else None
        self._chains: dict[int, list[Node]] = {}
        self._tokens: dict[int, list[int]] = {}
        distinct = list(dict.fromkeys(self._masks))
        self._lane_of = [distinct.index(mask) for mask in self._masks]
        codecs = (self.codec_k, self.codec_v)
        self._lanes = [
            Lane(self, mask, [i for i, m in enumerate(self._masks) if m == mask], page_size, slack, codecs, number, self._index)
            for number, mask in enumerate(distinct)
        ]
        self.rewind = float("inf") if all(mask.window is None for mask in distinct) else slack
        if budget_bytes is None:
            pages = [0] * len(self._lanes)
        else:
            one = [lambda length, lane=lane: lane.peak_pages(length, length) for lane in self._lanes]
            pages = split(self._lanes, budget_bytes, lambda length: [peak(length) for peak in one], geometry.context)
        for lane, count in zip(self._lanes, pages, strict=True):
            lane.allocate(count)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        number = self._lane_of[layer]
        keys, values = self._lanes[number].stores[layer]
        slots, where = plan.private.slots[number], plan.private.where[number]
        self.ops.write_rows(keys, slots, k)
        self.ops.write_rows(values, slots, v)
        return self.ops.attend_paged(q, keys, values, where, plan.batch, self._masks[layer], self.geometry.scale, self.geometry.softcap)

    def stats(self) -> Stats:
        lengths = {sid: history.length for sid, history in self._histories.items()}
        parts = [lane.stats(lengths) for lane in self._lanes]
        return Stats(*(sum(getattr(part, name) for part in parts) for name in Stats.__dataclass_fields__))

    def bytes_for(self, lengths: Sequence[int], chunk: int = 1) -> int:
        return sum(lane.page_bytes * (1 + sum(lane.peak_pages(length, chunk) for length in lengths)) for lane in self._lanes)

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for lane in self._lanes for tensor in lane.tensors()]

    def _opened(self, sid: int, history: History, prompt: Sequence[int], expect: int | None) -> None:
        chain = [] if self._index is None else self._adoptable(prompt)
        for lane in self._lanes:
            lane.open(sid, 0 if expect is None else min(expect, self.geometry.context), [node.pages for node in chain])
        history.length = history.high = len(chain) * self.page_size
        if self._index is not None:
            self._chains[sid] = chain
            self._tokens[sid] = list(prompt[: history.length])
        self._histories[sid] = history

    def _adoptable(self, prompt: Sequence[int]) -> list[Node]:
        """The longest chain of whole pages, at most len - 1 tokens, that every lane can still read and rewind from."""
        chain = self._index.chain(prompt, max(len(prompt) - 1, 0) // self.page_size)
        while chain and not all(lane.holds([node.pages for node in chain]) for lane in self._lanes):
            chain.pop()
        return chain

    def _forked(self, sid: int, child: int) -> None:
        for lane in self._lanes:
            lane.fork(sid, child)
        if self._index is not None:
            self._chains[child] = list(self._chains[sid])
            self._tokens[child] = list(self._tokens[sid])

    def _truncated(self, sid: int, length: int) -> None:
        for lane in self._lanes:
            missing = lane.missing(sid, length)
            if missing is not None:
                raise CannotRewind(
                    f"sequence {sid} cannot go back to {length} tokens: that needs token {missing}, which slid out of the "
                    f"window; slack={self.slack} allows {max(0, self._histories[sid].high - self.slack)} and above"
                )
        for lane in self._lanes:
            lane.truncate(sid, length)
        if self._index is not None:
            del self._tokens[sid][length:]
            del self._chains[sid][length // self.page_size :]

    def _closed(self, sid: int) -> None:
        for lane in self._lanes:
            lane.close(sid)
        if self._index is not None:
            del self._chains[sid], self._tokens[sid]

    def _planned(self, spans: tuple[tuple[int, int, int], ...], pad_to: int | None = None) -> Plan:
        if self.budget_bytes is None:
            for lane in self._lanes:
                lane.reserve(spans)
        elif any(lane.short_pages(spans) for lane in self._lanes):
            wanted = [lane.wanted_pages(spans) for lane in self._lanes]
            rebalance(self._lanes, wanted, self.budget_bytes, tuple(sid for sid, _, _ in spans))
        taken = tuple(lane.take(spans) for lane in self._lanes)
        packed = Packed(spans, pad_to)
        addresses = [lane.addresses(packed) for lane in self._lanes]
        slots = tuple(self._tensor(packed, f"slots {number}", slots) for number, (slots, _) in enumerate(addresses))
        tables = (self._tensor(packed, f"pages {number}", pages) for number, (_, pages) in enumerate(addresses))
        where = tuple(PagedRows(pages, self.page_size) for pages in tables)
        return self._new_plan(packed, Placement(slots, where, taken), tuple(lane.generation for lane in self._lanes))

    def _committed(self, plan: Plan, token_ids: Sequence[int]) -> None:
        for lane, taken in zip(self._lanes, plan.private.taken, strict=True):
            lane.settle(taken)
        if self._index is not None:
            self._publish(plan, token_ids)
        for sid, _, _ in plan.spans:
            for lane in self._lanes:
                lane.slide(sid, self._histories[sid].length, self._histories[sid].high - self.slack)

    def _publish(self, plan: Plan, token_ids: Sequence[int]) -> None:
        """Pages that this step filled become findable and immutable: only now, when their rows are known to be written."""
        at = 0
        for sid, start, stop in plan.spans:
            tokens, chain = self._tokens[sid], self._chains[sid]
            tokens.extend(int(token) for token in token_ids[at : at + stop - start])
            at += stop - start
            while (len(chain) + 1) * self.page_size <= len(tokens):
                node = self._index.extend(chain, tokens)
                for lane in self._lanes:
                    lane.publish(node, sid, len(chain) - 1)

    def _aborted(self, plan: Plan) -> None:
        for lane, taken in zip(self._lanes, plan.private.taken, strict=True):
            lane.undo(taken)
