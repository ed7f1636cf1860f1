"""Splitting one attention step into tasks: which queries, which keys, how many parts. Integers only.

The parts of a span depend on that span and the number of threads, never on its batch mates, so neither do its sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.cpu.shared import TASK_WORDS
from kernels.rows import Batch, Mask

DECODE_PART = 256  # fewest keys worth a task of their own, for one query token and for a tile of them
CHUNK_PART = 512


@dataclass(frozen=True, eq=False)
class Tasks:
    """Rows for one kernel (see shared.py), and how many units their parts merge into."""

    table: np.ndarray  # [n, TASK_WORDS] int64
    units: int  # partial results to hold
    address: int

    def __len__(self) -> int:
        return len(self.table)


def plan_tasks(batch: Batch, mask: Mask, threads: int, kv_heads: int, tile: int, fused: bool) -> tuple[Tasks, Tasks]:
    """(single tokens, tiles of up to `tile` tokens). `fused` says whether single tokens have a kernel of their own."""
    singles: list[tuple[int, ...]] = []
    tiles: list[tuple[int, ...]] = []
    units = {"singles": 0, "tiles": 0}
    row = 0
    for span, (start, stop) in enumerate(batch.spans):
        tokens = stop - start
        if tokens == 1 and fused:
            first, sinks, keys = _keys(start, stop, mask)
            parts = _parts(keys, DECODE_PART, 2 * threads, threads)
            for split, (low, high) in enumerate(parts):
                singles.append((span, row, 1, start, 0, sinks, first, low, high, split, len(parts), units["singles"]))
            units["singles"] += len(parts)
        else:
            wanted = -(-2 * threads // (kv_heads * -(-tokens // tile)))
            for at in range(0, tokens, tile):
                count = min(tile, tokens - at)
                first, sinks, keys = _keys(start + at, start + at + count, mask)
                parts = _parts(keys, CHUNK_PART, wanted, threads)
                for head in range(kv_heads):
                    for split, (low, high) in enumerate(parts):
                        tiles.append((span, row + at, count, start + at, head, sinks, first, low, high, split, len(parts), units["tiles"]))
                    units["tiles"] += len(parts)
        row += tokens
    tiles.sort(key=lambda task: task[7] - task[8])  # longest first, so that no thread ends late
    return _table(singles, units["singles"]), _table(tiles, units["tiles"])


def _keys(start: int, stop: int, mask: Mask) -> tuple[int, int, int]:
    """The first position after the sinks, the sinks, and how many keys that makes, for queries start..stop-1."""
    first = mask.first_visible(start)
    sinks = min(mask.sinks, first)
    return first, sinks, sinks + stop - first


def _parts(keys: int, smallest: int, wanted: int, threads: int) -> list[tuple[int, int]]:
    count = 1 if threads == 1 else max(1, min(wanted, keys // smallest))
    size = -(-keys // count)
    size = -(-size // 64) * 64 if count > 1 else keys
    return [(low, min(low + size, keys)) for low in range(0, keys, size)]


def _table(rows: list[tuple[int, ...]], units: int) -> Tasks:
    table = np.array(rows, dtype=np.int64).reshape(-1, TASK_WORDS)
    return Tasks(table, units, table.ctypes.data)
