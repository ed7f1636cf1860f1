"""Which page ids are free, shared or kept for reuse: integers only, standard library only.

It does not know what a page holds, how many bytes it is, or which sequence maps it where.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

SCRATCH = 0  # never handed out: table entries that no query may read name it


class PagePool:
    """Reference-counted page ids 1..capacity. Id 0 is the scratch page.

    A page is free, owned (one count for each sequence that maps it) or cached: published, without an owner, handed out
    again only when no free page is left, oldest first. `on_evict(page)` is called before a published page is written to again.
    """

    def __init__(self, capacity: int, on_evict: Callable[[int], None] | None = None) -> None:
        self._free: list[int] = []
        self._refs: list[int] = [0]
        self._published: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict
        self.shared = 0  # pages with more than one owner
        self.grow(capacity)

    @property
    def capacity(self) -> int:
        """Pages there are, scratch not counted."""
        return len(self._refs) - 1

    @property
    def available(self) -> int:
        """Pages that `take` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> int:
        """Distinct pages with at least one owner."""
        return self.capacity - self.available

    @property
    def cached(self) -> int:
        """Published pages without an owner."""
        return len(self._cached)

    def refs(self, page: int) -> int:
        """Owners of `page`."""
        return self._refs[page]

    def grow(self, pages: int) -> None:
        """Add `pages` new ids."""
        first = len(self._refs)
        self._refs.extend([0] * pages)
        self._free[:0] = range(first + pages - 1, first - 1, -1)

    def compact(self, capacity: int) -> dict[int, int]:
        """Become a pool of `capacity` pages whose owned ones are numbered 1, 2, ... -> {old id: new id}. Cached pages are lost.

        ValueError, and no change, when more than `capacity` pages are owned.
        """
        if self.owned > capacity:
            raise ValueError(f"{self.owned} pages are owned: they do not fit {capacity}")
        while self._cached:
            self._evict()
        owned = [page for page, refs in enumerate(self._refs) if refs]
        moved = {old: new for new, old in enumerate(owned, 1)}
        self._refs = [0, *(self._refs[old] for old in owned), *[0] * (capacity - len(owned))]
        self._published = {moved[page] for page in self._published}
        self._free = list(range(capacity, len(owned), -1))
        return moved

    def take(self, count: int) -> list[int]:
        """`count` pages with one owner each. ValueError, and no change, when fewer are available."""
        if count > self.available:
            raise ValueError(f"{count} pages asked, {self.available} available")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each; a cached page comes back to life."""
        for page in pages:
            if self._refs[page] == 0 and page not in self._cached:
                raise ValueError(f"page {page} is free: it cannot be shared")
            self._cached.pop(page, None)
            self._refs[page] += 1
            self.shared += self._refs[page] == 2

    def release(self, pages: Iterable[int]) -> None:
        """One owner fewer for each. ValueError for a page nobody owns (a double free)."""
        for page in pages:
            if self._refs[page] == 0:
                raise ValueError(f"page {page} is released twice")
            self._refs[page] -= 1
            self.shared -= self._refs[page] == 1
            if self._refs[page] == 0:
                self._drop(page)

    def publish(self, page: int) -> None:
        """From now on immutable; kept as cached when its last owner leaves."""
        self._published.add(page)

    def retract(self, page: int) -> None:
        """No longer published, so that its only owner may write to it; announced like an eviction. Nothing when it was not published."""
        if page in self._published:
            self._withdraw(page)

    def _drop(self, page: int) -> None:
        if page in self._published:
            self._cached[page] = None
        else:
            self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._withdraw(page)
        return page

    def _withdraw(self, page: int) -> None:
        self._published.discard(page)
        if self._on_evict is not None:
            self._on_evict(page)
