"""Runs of neighbouring rows in one arena, handed out first fit: integers only, standard library only.

It does not know what a row is. First fit with neighbours merged is what contiguous KV allocators do, fragmentation included.
"""

from __future__ import annotations


class Extents:
    """Free runs of an arena of `size` rows."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (first row, rows), in order, never touching

    @property
    def free(self) -> int:
        """Rows not handed out."""
        return sum(rows for _, rows in self._free)

    def missing(self, wanted: list[int]) -> int:
        """Rows that cannot be placed when the runs in `wanted` are placed in this order; 0 when all fit. Changes nothing."""
        trial = Extents(0)
        trial._free = list(self._free)
        short = 0
        for rows in wanted:
            if trial.take(rows) is None:
                largest = max((run for _, run in trial._free), default=0)
                short += rows - largest
                if largest:
                    trial.take(largest)
        return short

    def take(self, rows: int) -> int | None:
        """The first row of a run of `rows`, or None when no free run is long enough."""
        for i, (first, run) in enumerate(self._free):
            if run >= rows:
                rest = [(first + rows, run - rows)] if run > rows else []
                self._free[i : i + 1] = rest
                return first
        return None

    def extend(self, stop: int, rows: int) -> bool:
        """Hand out the `rows` rows from `stop` on if all of them are free; False, and no change, otherwise."""
        for i, (first, run) in enumerate(self._free):
            if first == stop and run >= rows:
                self._free[i : i + 1] = [(first + rows, run - rows)] if run > rows else []
                return True
        return False

    def give(self, first: int, rows: int) -> None:
        """Hand a run back and merge it with its neighbours. ValueError when part of it is free already."""
        if any(first < f + r and f < first + rows for f, r in self._free):
            raise ValueError(f"rows {first}..{first + rows - 1} are given back twice")
        runs = sorted([*self._free, (first, rows)])
        merged = [runs[0]]
        for start, run in runs[1:]:
            last, length = merged[-1]
            if last + length == start:
                merged[-1] = (last, length + run)
            else:
                merged.append((start, run))
        self._free = merged
