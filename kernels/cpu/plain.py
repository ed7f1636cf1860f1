"""The ops on a CPU through torch alone: what runs without a compiler, and for dtypes that have no compiled kernel.

It does not know which sequence a row belongs to. Attention gathers nothing that is already contiguous, reads each KV head
once for all the query heads that share it, and keeps the score matrix of a long prefill in cache.
"""

from kernels.cpu.attention import attend_dense, attend_packed, attend_paged
from kernels.cpu.pointwise import gated, rms_norm, rope
from kernels.reference import copy_pages, move_rows, new_rows, read_rows, write_rows

__all__ = [
    "attend_dense",
    "attend_packed",
    "attend_paged",
    "copy_pages",
    "gated",
    "move_rows",
    "new_rows",
    "read_rows",
    "rms_norm",
    "rope",
    "write_rows",
]
