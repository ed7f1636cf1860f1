"""One budget in bytes, shared by pools whose pages differ in size: who owns how many, and how that shifts when one runs out.

It does not know what a page holds. Pools that fill up at different rates (layers with and without a window; codes and raw
rows) start with a split that suits whole sequences, and are rebalanced when a step asks for another one: what fits the budget
fits the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from strategies.geometry import CacheFull, Refused
from strategies.pages import PagePool


class Pool(Protocol):
    """Pages of one size. Each pool also owns one scratch page."""

    page_bytes: int
    pool: PagePool

    def allocate(self, pages: int) -> None:
        """Own `pages` usable pages, at least as many as before."""

    def resize(self, pages: int) -> None:
        """Own `pages` usable pages, fewer than before and no fewer than are owned."""


def split(pools: Sequence[Pool], budget_bytes: int, pages_for: Callable[[int], Sequence[int]], context: int) -> list[int]:
    """Usable pages for each pool to begin with: as many sequences of `context` tokens as fit, or the longest one that does.

    pages_for(length): pages of each pool that one sequence of `length` tokens takes. Refused when not even one token fits.
    """
    usable = budget_bytes - sum(pool.page_bytes for pool in pools)

    def cost(length: int) -> int:
        return sum(pages * pool.page_bytes for pages, pool in zip(pages_for(length), pools, strict=True))

    if usable >= cost(context):
        return [int(usable * pages // cost(context)) for pages in pages_for(context)]
    low, high = 0, context
    while low < high:
        length = (low + high + 1) // 2
        low, high = (length, high) if cost(length) <= usable else (low, length - 1)
    if low == 0:
        needed = budget_bytes - usable + cost(1)
        raise Refused(
            f"a budget of {budget_bytes} bytes holds no page: the smallest that does is {needed} bytes; "
            "raise the budget or use smaller pages"
        )
    return list(pages_for(low))


def rebalance(pools: Sequence[Pool], wanted: Sequence[int], budget_bytes: int, sids: tuple[int, ...]) -> None:
    """Give every pool the pages it owns plus those `wanted`; what is left over goes to all of them in proportion.

    Cached pages may be lost. CacheFull, and no change, when the budget does not hold all that is needed.
    """
    needed = [pool.pool.owned + more for pool, more in zip(pools, wanted, strict=True)]
    total = sum((count + 1) * pool.page_bytes for count, pool in zip(needed, pools, strict=True))
    if total > budget_bytes:
        raise CacheFull(total - budget_bytes, sids)
    spare = budget_bytes - total
    pages = [count + spare * count // total for count in needed]
    for pool, count in zip(pools, pages, strict=True):  # before the others grow, so that the budget holds on the way too
        if count < pool.pool.capacity:
            pool.resize(count)
    for pool, count in zip(pools, pages, strict=True):
        if count > pool.pool.capacity:
            pool.allocate(count)
