"""What a cache must hold, and the words of the contract that need no tensor. Imports no torch.

It does not know where rows are stored; that is each strategy's own file.
"""

from __future__ import annotations

from dataclasses import dataclass

INITS = ("mean", "first", "random")


@dataclass(frozen=True)
class LayerShape:
    """K and V of one layer: `kv_heads` rows of `head_dim` values a token; `window` is the model's own, counting the query itself."""

    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class Geometry:
    """The part of a model that a cache has to know."""

    layers: tuple[LayerShape, ...]
    query_heads: int
    scale: float  # multiplies q . k
    softcap: float | None
    dtype: str  # the working dtype: float64, float32, bfloat16 or float16
    device: str
    context: int  # the most tokens one sequence may reach


@dataclass(frozen=True)
class HeadSharing:
    """KV heads that the loader must give the model: fewer share (gqa, mqa), more repeat; None is one per query head (mha).

    init says how shared heads are made from the checkpoint's: their mean, the first of each group, or random
    (GQA, Ainslie et al. 2023, section 2.1: mean > first > random).
    """

    kv_heads: int | None
    init: str = "mean"

    def __post_init__(self) -> None:
        if self.kv_heads is not None and self.kv_heads < 1:
            raise ValueError(f"heads.kv_heads={self.kv_heads}: use 1 or more, or null for one per query head")
        if self.init not in INITS:
            raise ValueError(f"heads.init={self.init!r}: choose one of {', '.join(INITS)}")


@dataclass(frozen=True)
class Stats:
    """Bytes at one moment. reserved: owned from the device. in_use: mapped to a live sequence, shared pages once.
    live: distinct rows that a future query may read. cached: prefix pages that no live sequence uses."""

    reserved_bytes: int
    in_use_bytes: int
    live_bytes: int
    cached_bytes: int

    @property
    def waste(self) -> float | None:
        """1 - live / in_use; None while nothing is in use."""
        return None if self.in_use_bytes == 0 else 1.0 - self.live_bytes / self.in_use_bytes


class CacheFull(RuntimeError):
    """The plan needs `short_bytes` more than the budget has; `sids` are the sequences that asked. Nothing has changed."""

    def __init__(self, short_bytes: int, sids: tuple[int, ...]) -> None:
        super().__init__(f"the KV budget is {short_bytes} bytes short for sequences {list(sids)}")
        self.short_bytes = short_bytes
        self.sids = sids


class CannotRewind(RuntimeError):
    """The sequence no longer holds the tokens that a continuation at this length needs. Nothing has changed."""


class Refused(ValueError):
    """The strategy cannot honour what it was built with; the message names both values."""
