"""Page tables of live sequences as one integer array, so that a step's tables and slots are gathered without a Python loop.

It does not know who owns a page: that is `pages.py`.
"""

from __future__ import annotations

import numpy as np

from strategies.pages import SCRATCH


class PageTables:
    """For each sequence the page id of every logical page; index = logical page for ever, dropped pages name the scratch page."""

    def __init__(self) -> None:
        self._ids = np.full((1, 8), SCRATCH, dtype=np.int32)  # [rows, widest]
        self._row: dict[int, int] = {}
        self._spare: list[int] = [0]
        self._count: dict[int, int] = {}

    def open(self, sid: int) -> None:
        """An empty table."""
        if not self._spare:
            rows = len(self._ids)
            self._ids = np.concatenate((self._ids, np.full_like(self._ids, SCRATCH)))
            self._spare = list(range(2 * rows - 1, rows - 1, -1))
        self._row[sid] = self._spare.pop()
        self._count[sid] = 0

    def close(self, sid: int) -> None:
        """Forget the table; its row goes back clean, so that nobody meets a previous owner's ids."""
        row = self._row.pop(sid)
        self._ids[row, : self._count.pop(sid)] = SCRATCH
        self._spare.append(row)

    def count(self, sid: int) -> int:
        """Logical pages, dropped ones included."""
        return self._count[sid]

    def page(self, sid: int, index: int) -> int:
        """The page id at `index`; IndexError past the end."""
        if not 0 <= index < self._count[sid]:
            raise IndexError(f"sequence {sid} has {self._count[sid]} pages: there is no page {index}")
        return int(self._ids[self._row[sid], index])

    def set(self, sid: int, index: int, page: int) -> None:
        """Replace the page at `index`."""
        self.page(sid, index)
        self._ids[self._row[sid], index] = page

    def append(self, sid: int, pages: list[int]) -> None:
        """Add logical pages at the end."""
        first, stop = self._count[sid], self._count[sid] + len(pages)
        self._widen(stop)
        self._ids[self._row[sid], first:stop] = pages
        self._count[sid] = stop

    def cut(self, sid: int, count: int) -> list[int]:
        """Drop the logical pages from `count` on; returns the mapped ids among them."""
        row = self._row[sid]
        gone = self._ids[row, count : self._count[sid]]
        mapped = gone[gone != SCRATCH].tolist()
        gone[:] = SCRATCH
        self._count[sid] = min(count, self._count[sid])
        return mapped

    def clear(self, sid: int, first: int, stop: int) -> list[int]:
        """Name the scratch page at first..stop-1; returns the mapped ids that stood there."""
        gone = self._ids[self._row[sid], first : min(stop, self._count[sid])]
        mapped = gone[gone != SCRATCH].tolist()
        gone[:] = SCRATCH
        return mapped

    def renumber(self, moved: dict[int, int]) -> None:
        """Every page id that a table names is now called moved[id]."""
        names = np.full(max(moved, default=0) + 1, SCRATCH, dtype=np.int32)
        names[list(moved)] = list(moved.values())
        self._ids = names[self._ids]

    def mapped(self, sid: int) -> list[int]:
        """The mapped page ids, in logical order."""
        ids = self._ids[self._row[sid], : self._count[sid]]
        return ids[ids != SCRATCH].tolist()

    def gather(self, sids: list[int], width: int) -> np.ndarray:
        """[B, width] int32: the tables of `sids`, a copy; entries past a table's end name the scratch page."""
        rows = [self._row[sid] for sid in sids]
        self._widen(width)
        return np.ascontiguousarray(self._ids[rows, : max(width, 1)])

    def _widen(self, width: int) -> None:
        while width > self._ids.shape[1]:
            self._ids = np.concatenate((self._ids, np.full_like(self._ids, SCRATCH)), axis=1)
