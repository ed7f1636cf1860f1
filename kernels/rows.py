"""The shapes that kernels share: where rows are stored, which rows a step addresses, and which keys a query may see.

Knows tensors and integers; it does not know which sequence a row belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.codec import Codec


@dataclass(frozen=True)
class Mask:
    """Query i sees key j when j <= i and (i - j < window or j < sinks); `window` counts the query itself, None = no limit."""

    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} sees nothing: use 1 or more, or null for no window")
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks} is negative: use 0 or more")
        if self.window is None and self.sinks:
            raise ValueError(f"sinks={self.sinks} without a window changes nothing: set a window or sinks=0")

    def first_visible(self, position: int) -> int:
        """The lowest non-sink key that the query at `position` may see."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass
class RowStore:
    """K or V rows of one layer, encoded. The backend that made it owns the layout; `reference` and `triton` use this one.

    codes: [count, heads, codec.codes_per_row(head_dim)]; scales: [count, heads, codec.scales_per_row(head_dim)] or None.
    Row `slot` of a paged store is page slot // page_size, offset slot % page_size.
    """

    codec: Codec
    heads: int
    head_dim: int
    dtype: torch.dtype  # the working dtype, which decoded rows are handed back in
    page_size: int | None  # None: the store is addressed by row, not by page
    codes: torch.Tensor
    scales: torch.Tensor | None

    @property
    def count(self) -> int:
        """Rows held."""
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held, counted from the tensors themselves."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales) if t is not None)


@dataclass(frozen=True)
class Batch:
    """The packed queries of one step: span b holds rows cu_seqlens[b]:cu_seqlens[b+1], at positions starts[b], starts[b]+1, ...

    Device backends read the tensors; host backends read `spans`, which says the same in plain ints.
    """

    cu_seqlens: torch.Tensor  # [B+1] int32
    starts: torch.Tensor  # [B] int32, position of the first query of each span
    spans: tuple[tuple[int, int], ...]  # ((start, stop), ...) of each span, on the host
    splits: int = 1  # programs that share the keys of one span (split-over-keys kernels); the planner decides
    bound: int | None = None  # no span stops later, in this step or in another that replays its calls; None: there is no other
    pads: int = 0  # the last `pads` spans are one token each that nobody asked for, at position 0 of a scratch row

    @property
    def longest(self) -> int:
        """No span stops later than this. What is launched may depend on it, and on no single span's stop."""
        return max(stop for _, stop in self.spans) if self.bound is None else self.bound

    @property
    def tokens(self) -> int:
        """Packed rows of this step, T."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class DenseRows:
    """Span b's token at position p is in row bases[b] + p of the store."""

    bases: torch.Tensor  # [B] int64
    host: tuple[int, ...] = field(repr=False)  # the same on the host


@dataclass(frozen=True)
class PagedRows:
    """Span b's token at position p is in row pages[b, p // page_size] * page_size + p % page_size of the store.

    Entries of pages that no query of this step may see (slid out of the window, or past the end) name page 0: the scratch
    page, which no sequence ever owns. So do all entries of pads, which read what pads wrote there.
    """

    pages: torch.Tensor  # [B, P] int32
    page_size: int
